"""Parsers for answers that reasoning-gym's verifiers would run as Python: nothing in an answer is evaluated.

Five verifiers pass the answer to sympy's `parse_expr`, which is `eval`, and four to `eval` itself. `install` replaces
these functions. A formula is parsed to a syntax tree, of which only numbers, symbols, arithmetic and the functions of
its data set are converted; a list is read by `ast.literal_eval`. What else an answer contains raises ValueError, which
these verifiers score as a wrong answer.
"""

import ast
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from types import ModuleType
from typing import Any

import sympy
from reasoning_gym.dataset import ProceduralDataset
from sympy.parsing import sympy_parser

_MOST_CHARACTERS = 4_000
"""Of a formula. The longest stored answer has about 200."""
_MOST_DIGITS = 400
_LARGEST_POWER, _MOST_BITS = 200, 10_000
"""Largest exponent of anything, and longest power of a number."""
_DECIMAL = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?", re.ASCII)
_WHOLE = re.compile(r"\d+\.?", re.ASCII)
"""Numbers that countdown and puzzle24 count right: they would see two in 1.5, and none in 2e1, 0x18 and 2_4."""
_SPLIT = re.compile(r"(?<=([*/]))\s+(?=\1)")
"""The space in `* *`, which sympy reads as `**`."""
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CONSTANTS = {name: getattr(sympy, name) for name in ("pi", "E", "I")}
_ANGLES = [
    f"{arc}{name}{h}" for name in ("sin", "cos", "tan", "cot", "sec", "csc") for arc in ("", "a") for h in ("", "h")
]
_ELEMENTARY = ("exp", "log", "ln", "sqrt", "cbrt", "root", "Abs", "sign", "Rational", *_ANGLES)
_INTEGRALS = {name: getattr(sympy, name) for name in _ELEMENTARY} | {"abs": sympy.Abs}
_FORMULAS: dict[str, tuple[dict[str, Any], bool]] = {
    "algebra.simple_integration": (_INTEGRALS, True),
    "algebra.intermediate_integration": (_INTEGRALS, True),
    "algebra.polynomial_multiplication": ({}, True),
    "games.countdown": ({}, False),
    "games.puzzle24": ({}, False),
}
"""Module -> its functions, and whether its answers have symbols."""
_TRUSTED = (
    *("algorithmic.number_sorting", "arithmetic.basic_arithmetic", "arithmetic.bitwise_arithmetic"),
    *("arithmetic.gsm_symbolic.generators_00_49", "arithmetic.gsm_symbolic.generators_50_99", "code.codeio"),
)
"""Modules that evaluate only what their generators have written."""


def install() -> None:
    """Replace `eval`, `exec` and sympy's parser in reasoning-gym's modules. Raise LookupError if one of the modules
    that parse formulas does not exist: the library was changed."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("reasoning_gym.")}
    for name, module in modules.items():
        if name.removeprefix("reasoning_gym.") not in _TRUSTED:
            vars(module).update(eval=ast.literal_eval, exec=_refuse)
    for name, (functions, symbols) in _FORMULAS.items():
        module = modules[f"reasoning_gym.{name}"]
        parse = partial(parse_formula, functions=functions, symbols=symbols)
        for attribute, value in list(vars(module).items()):
            if value is sympy_parser.parse_expr:
                vars(module)[attribute] = parse
            elif value is sympy:
                # its users write sympy.parse_expr
                vars(module)[attribute] = _with_parser(parse)
    # sympify, and everything that calls it with a text
    sympy_parser.parse_expr = sympy.parse_expr = parse_formula
    sympy_parser.eval_expr = _refuse
    # the distance of nan to any number is nan: min(1.0, nan) is 1.0, and nan > 1 is false
    vars(modules["reasoning_gym.algebra.complex_arithmetic"]).update(float=_finite, complex=_finite_complex)
    vars(modules["reasoning_gym.algorithmic.number_sorting"])["float"] = _finite
    vars(modules["reasoning_gym.probability.coin_flip"])["Fraction"] = _fraction


def score(data_set: ProceduralDataset, answer: str, entry: dict[str, Any]) -> float:
    """Return the verifier's score of an answer to `entry`, which it may change. Raise ValueError if not 0 to 1."""
    value = float(data_set.score_answer(answer, entry))
    if not 0.0 <= value <= 1.0 + 1e-9:  # some add fractions
        raise ValueError(f"a score of {value:g}")
    return value


def parse_formula(
    text: str,
    local_dict: Mapping[str, Any] | None = None,
    *args: Any,
    functions: Mapping[str, Any] = _INTEGRALS,
    symbols: bool = True,
    **options: Any,
) -> Any:
    """Convert a formula to a sympy expression, as `sympy.parse_expr(text, local_dict)` does for arithmetic.
    `local_dict`: names and their sympy objects. `functions`: name -> sympy function, which may be called with one or
    two arguments. `symbols`: False if the formula has only numbers. Then one that its verifier would not count right
    becomes nan. Raises ValueError if `text` is no such formula."""
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"a formula of more than {_MOST_CHARACTERS} characters")
    if "#" in text:  # a comment may have numbers
        raise ValueError("a comment in a formula")
    text = _SPLIT.sub("", text.strip())
    names = {**_CONSTANTS, **(local_dict or {})} if symbols else {}

    def convert(node: ast.expr) -> Any:
        value = converted(node)
        if value.is_Rational and max(abs(value.p), value.q).bit_length() > _MOST_BITS:
            raise ValueError(f"a number of more than {_MOST_BITS} bits in a formula")
        if value.is_Float and value and not 1e-300 < abs(value) < 1e300:
            raise ValueError("a number beyond 1e300 in a formula")
        return value

    def converted(node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return _number(ast.get_source_segment(text, node) or "", symbols)
            case ast.Name(id=name) if symbols:
                return names[name] if name in names else _symbol(name)
            case ast.UnaryOp(op=ast.USub()):
                return -convert(node.operand)
            case ast.UnaryOp(op=ast.UAdd()):
                return convert(node.operand)
            case ast.BinOp(op=ast.Pow()):
                return _power(convert(node.left), convert(node.right))
            case ast.BinOp(op=op) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](convert(node.left), convert(node.right))
            case ast.Call(func=ast.Name(id=name), args=[_] | [_, _] as args, keywords=[]) if name in functions:
                return functions[name](*map(convert, args))
        raise ValueError(f"{type(node).__name__} in a formula")

    try:
        match ast.parse(text, mode="eval").body:
            case ast.Constant(value=str(quoted)) if symbols:
                return quoted  # sympy's functions parse it, with this function
            case formula:
                return convert(formula)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a formula: {error}") from error


def _number(text: str, symbols: bool) -> Any:
    if not _DECIMAL.fullmatch(text) or len(text) > _MOST_DIGITS or not math.isfinite(float(text)):
        raise ValueError(f"{text[:40]} in a formula")
    if text.isdigit():
        return sympy.Integer(int(text))
    return sympy.Float(text) if symbols or _WHOLE.fullmatch(text) else sympy.nan


def _symbol(name: str) -> Any:
    """Return a symbol, as of a constant of integration; a name that sympy uses for something else is none."""
    if hasattr(sympy, name) or name.startswith("_"):
        raise ValueError(f"{name} in a formula")
    return sympy.Symbol(name)


def _power(base: Any, exponent: Any) -> Any:
    if exponent.is_number and not abs(exponent) <= _LARGEST_POWER:
        raise ValueError(f"a power of more than {_LARGEST_POWER}")
    if base.is_Rational and exponent.is_number and max(abs(base.p), base.q).bit_length() * abs(exponent) > _MOST_BITS:
        raise ValueError(f"a power of more than {_MOST_BITS} bits")
    return base**exponent


def _with_parser(parse: Callable[..., Any]) -> ModuleType:
    module = ModuleType("sympy")
    vars(module).update(vars(sympy), parse_expr=parse)
    return module


def _finite(text: Any) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no finite number")
    return number


def _fraction(text: str) -> Fraction:
    if re.search(r"[eE][+-]?[\d_]{4}", text):  # thousands of digits
        raise ValueError(f"{text[:40]} is no probability")
    return Fraction(text)


def _finite_complex(*parts: Any) -> complex:
    number = complex(*parts)
    _finite(abs(number))
    return number


def _refuse(*args: Any, **options: Any) -> None:
    raise ValueError("nothing is evaluated here")

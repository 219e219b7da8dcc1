"""`calculator`: arithmetic for models with a separate evaluator; no text is ever passed to Python's `eval`."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from agentfactory.tools.tool import tool

_LONGEST, _MOST_BITS, _LARGEST_ARGUMENT = 1000, 12_000, 1000

_CONSTANTS = {"pi": math.pi, "π": math.pi, "e": math.e, "tau": math.tau}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@tool
async def calculator(expression: str) -> str:
    """Compute an arithmetic expression, such as sqrt(2) * (3 + 4)^2 / 7.

    Args:
        expression: Numbers, + - * / // % ^ and parentheses; pi, e; functions such as sqrt, exp, log (natural, or
            log(x, base)), log10, sin (in radians), degrees, round, abs, min, max, factorial, gcd, comb.
    """
    return _show(evaluate(expression))


def evaluate(expression: str) -> int | float:
    """Return the value. Raises ValueError, for the model, if it is not finite and real, or numbers are too large."""
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; {_LONGEST} are possible")
    for written, meant in {"^": "**", "×": "*", "·": "*", "÷": "/", "−": "-"}.items():
        expression = expression.replace(written, meant)
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _checked(_value(tree.body))
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("the expression is nested too deeply") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("a number in it is too large") from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return _checked(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
            return _power(_value(base), _value(exponent))
        case ast.BinOp(op=sign, left=left, right=right) if type(sign) in _BINARY:
            return _checked(_BINARY[type(sign)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _call(name, [_value(argument) for argument in arguments])
        case ast.Call(func=ast.Name(id=name)) if name not in _FUNCTIONS:
            raise ValueError(f"there is no function {name}; there are {', '.join(_FUNCTIONS)}")
        case ast.Name(id=name):
            raise ValueError(f"{name} has no value; the constants are {', '.join(_CONSTANTS)}")
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _call(name: str, arguments: list[Any]) -> Any:
    try:
        return _checked(_FUNCTIONS[name](*arguments))
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{name}({', '.join(map(_show, arguments))}): {error}") from None


def _power(base: Any, exponent: Any) -> Any:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and exponent > 0 and abs(base) > 1 and base.bit_length() * exponent > _MOST_BITS:
        raise OverflowError
    return _checked(base**exponent)


def _checked(value: Any) -> int | float:
    if isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            raise OverflowError
        return value
    if isinstance(value, complex) or math.isnan(value):
        raise ValueError("it has no real value")
    if math.isinf(value):
        raise OverflowError
    return float(value)


def _show(value: int | float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _bounded(function: Callable[..., int]) -> Callable[..., int]:

    def call(*arguments: Any) -> int:
        if any(abs(argument) > _LARGEST_ARGUMENT for argument in arguments):
            raise ValueError(f"arguments up to {_LARGEST_ARGUMENT} are possible")
        return function(*arguments)

    return call


def _round(number: float, digits: int = 0) -> float:
    if abs(digits) > _LARGEST_ARGUMENT:
        raise ValueError(f"digits up to {_LARGEST_ARGUMENT} are possible")
    return round(number, digits) if digits else round(number)


_SAME_NAME = "sqrt cbrt exp log log2 log10 sin cos tan asin acos atan atan2 sinh cosh tanh degrees radians hypot"
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in f"{_SAME_NAME} floor ceil trunc gcd lcm".split()},
    "ln": math.log,
    "abs": abs,
    "min": min,
    "max": max,
    "round": _round,
    **{name: _bounded(getattr(math, name)) for name in ("factorial", "comb", "perm")},
}

"""Formulas of answers: equal to what sympy's own parser makes of them, or refused; never evaluated."""

from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

import sympy
from sympy.parsing.sympy_parser import parse_expr

from agentfactory.worlds.reasoning_gym.answers import parse_formula

pytestmark = pytest.mark.unit

X = {"x": sympy.Symbol("x"), "C": sympy.Symbol("C")}


@pytest.mark.parametrize(
    "text",
    [
        *("7*x**9 - 2*x**6 + C", " -x**5/7 - x**(3/2) ", "7 * x * * 9 - 2", "2*(4*x + 2)**(3/2)/3 + C"),
        "x*asin(3*x) + sqrt(1 - 9*x**2)/3 + constant",
        "E**x*sin(pi*x) + I - ln(abs(x)) + log(x, 2) + Rational(1, 3)*cbrt(x)",
        *("0.1*x + 1.23456789012345678901 - .5e-3 + 1E5", "17 // 5 + 17 % 5 - +3", "1/0", "(\n x +\n 1)"),
    ],
)
def test_a_formula_is_what_sympy_makes_of_it(text: str) -> None:
    assert parse_formula(text, X) == parse_expr(text, dict(X))


@pytest.mark.parametrize(("text", "value"), [("49*(85 - 1)/14 - 73", 221), ("73.", 73.0), ("2**3", 8), ("-7//2", -4)])
def test_formulas_of_numbers(text: str, value: int) -> None:
    assert parse_formula(text, functions={}, symbols=False) == value


@pytest.mark.parametrize("text", ["1.5*4", "2e1 + 4", ".5"])
def test_numbers_that_a_verifier_counts_as_others_have_no_value(text: str) -> None:
    assert parse_formula(text, functions={}, symbols=False) is sympy.nan


CODE = [
    *("__import__('os').system('touch {file}')", 'sympify(\'open("{file}", "w")\')'),
    *("sympify(sstr(open)('{file}'))", "srepr(x)", "Lambda(x, x)(1)", "(lambda: 1)()", "x.__class__.__mro__"),
    *("[y for y in (1, 2)]", "x if x else 1", "(y := 3)", "x[0]", "*x", "f'{{open}}'", "'a' * 1000000000"),
    *("Symbol('x')", "Function('f')(x)", "eval('1')", "exp(x, evaluate=False)", "exp(*x)", "x == 1", "not x"),
    *("~x", "S", "beta", "__builtins__", "True", "...", "b'1'", "0x18", "2_4", "3j", "1e400", "24 # 1 2 3"),
    *("9**9**9**9", "x**201", "(9**200)**200", "10e300**200", "(10.0**200//1)**40", "Rational(1.0e-99**200)"),
    *("1e100", "1e-999999999", "expand((x + 1)**2)", "integrate(x, x)", "Integral(x, x)", "2x", "x; y", ""),
    *("((((" * 100, "-" * 3_000 + "1", "1+" * 3_000 + "1", "9" * 401),
]


@pytest.mark.parametrize("text", CODE, ids=range(len(CODE)))
def test_anything_else_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "touched"
    with pytest.raises(ValueError, match=r"formula|power|characters"):
        parse_formula(text.replace("{file}", str(file)), X)
    assert not file.exists()
    if "**" not in text and "/" not in text:
        with pytest.raises(ValueError, match=r"formula|power|characters"):
            parse_formula(text, functions={}, symbols=False)

"""The subprocess in which `math_equal` compares, since sympy can hang or exhaust memory on model output. It reads
requests as JSON lines on stdin: `prediction`, `answers`, `bare` (the prediction is a bare expression), `strict`,
`seconds`. It writes a line with the number of parsed `answers`, and one with the result, `equal`. The kernel's alarm
ends a process that takes too long; the end of stdin ends one whose parent is gone."""

import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any

import math_verify.parser
from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy.parsing import sympy_parser

from agentfactory.base.processes.memory import ENDS, peak_bytes

MEMORY_BYTES = 2 << 30
_GROWN_BYTES = 1 << 29
"""Growth of memory, such as of sympy's caches, after which the process ends and another takes its place."""
_ARITHMETIC = re.compile(r"[\d.\s+*/()-]*", re.ASCII)
_parse = sympy_parser.parse_expr
_ENVIRONMENTS = ("$", "\\(", "\\[", "\\boxed")
_ANYWHERE = (LatexExtractionConfig(), ExprExtractionConfig())
# only expressions that are marked as the answer, in valid LaTeX
_MARKED = (
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    ),
)


def read_expression(text: str) -> list[Any]:
    """Parse a bare expression, in a LaTeX environment, without which math-verify would find only the 1 in `x + 1`."""
    return read_text(text if any(mark in text for mark in _ENVIRONMENTS) else f"${text}$")


def read_text(text: str, strict: bool = False) -> list[Any]:
    """Return the expressions that math-verify finds in a text."""
    # math-verify's own time limits need SIGALRM, which this process already uses
    if strict:
        return list(parse(text, extraction_config=_MARKED, extraction_mode="first_match", parsing_timeout=None))
    return list(parse(text, extraction_config=_ANYWHERE, parsing_timeout=None))


def parse_arithmetic(text: str, *args: Any, **options: Any) -> Any:
    """Parse a formula like `sympy.parse_expr`, which evaluates Python. Raise ValueError unless it is arithmetic."""
    if not _ARITHMETIC.fullmatch(text):
        raise ValueError("not arithmetic")
    return _parse(text, *args, **options)


def main() -> None:
    # math-verify's patterns leave nothing else to it; sympify gives it any text
    math_verify.parser.parse_expr = sympy_parser.parse_expr = parse_arithmetic
    logging.disable()  # texts that cannot be parsed are expected
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # send other output to stderr
    print(json.dumps({"ready": True}), file=replies)
    before = peak_bytes()
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        answers = [parsed for answer in request["answers"] if (parsed := read_expression(answer))]
        print(json.dumps({"answers": len(answers)}), file=replies)
        text = request["prediction"]
        found = read_expression(text) if request["bare"] else read_text(text, request["strict"])
        equal = any(verify(answer, found, timeout_seconds=None) for answer in answers)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"equal": equal, ENDS: peak_bytes() - before > _GROWN_BYTES}), file=replies)


if __name__ == "__main__":
    main()

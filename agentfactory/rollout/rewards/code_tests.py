"""Tests of programs written by models: the programs run in the sandbox, and their output is checked outside."""

import ast
import asyncio
import inspect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from agentfactory.rollout.rewards import call_harness
from agentfactory.rollout.rewards.reward_spec import reward
from agentfactory.rollout.rewards.text import OPTIONS, field_of
from agentfactory.tools.sandbox.session import ScriptResult, run_script


@plain_dataclass(frozen=True)
class ProgramTest:
    """A test of a program's stdout, given `input` on stdin."""

    input: str
    output: str


@plain_dataclass(frozen=True)
class CallTest:
    """A test of the return value of a function, or of a method given as `Class.method`."""

    function: str
    args: list[Any]
    kwargs: dict[str, Any]
    output: Any


def code_of(prediction: str) -> str:
    """Return the last ``` block that is marked as Python or unmarked; without one, the whole prediction."""
    code = prediction
    for block in prediction.split("```")[1::2]:
        label, newline, body = block.partition("\n")
        if newline and label.strip().lower() in ("", "python", "python3", "py"):
            code = body
    return code


def read_tests(tests: Any) -> list[ProgramTest | CallTest]:
    """Parse the tests of a row: a list, or its JSON text, of {input, output}, {function, args, kwargs, output}, or
    assertions such as `assert add(1, 2) == 3`. Raise ValueError if a test has none of these forms."""
    if isinstance(tests, str):
        tests = json.loads(tests)
    if not isinstance(tests, Sequence) or not tests:
        raise ValueError(f"got {tests!r}; it must be a list of tests")
    return [_read_test(test) for test in tests]


def _read_test(test: Any) -> ProgramTest | CallTest:
    if isinstance(test, str):
        return _read_assertion(test)
    # in a parquet column, all rows have all keys
    given = {key: value for key, value in test.items() if value is not None} if isinstance(test, dict) else {}
    if given.keys() == {"input", "output"}:
        return ProgramTest(str(given["input"]), str(given["output"]))
    if "function" in given and given.keys() <= {"function", "args", "kwargs", "output"}:
        return CallTest(given["function"], given.get("args", []), given.get("kwargs", {}), given.get("output"))
    raise ValueError(f"the test {test!r} is neither {{input, output}} nor {{function, args, kwargs, output}}")


def _read_assertion(text: str) -> CallTest:
    match ast.parse(text.strip()).body:
        case [ast.Assert(ast.Compare(ast.Call(function, args, keywords), [ast.Eq()], [output]))]:
            named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg}
            if len(named) == len(keywords):
                positional = [ast.literal_eval(argument) for argument in args]
                return CallTest(ast.unparse(function), positional, named, ast.literal_eval(output))
    fix = "write `assert function(literals) == literal`, or a test of {function, args, output}"
    raise ValueError(f"{text!r} cannot be checked outside the sandbox; {fix}")


@reward
@dataclass(config=OPTIONS)
class CodeTests:
    """1 if the program passes all tests, else 0; metrics `success` and `tests_passed`, the fraction passed. Testing
    stops at the first failed test, unless `partial` is set, and always after a test that exceeds its time limit."""

    field: str = "tests"
    """Field of the row: a list of tests, or its JSON text."""
    partial: bool = False
    seconds: Annotated[float, Field(gt=0)] = 10.0
    """Time limit of one program, and of all function calls together."""
    memory_mb: Annotated[int, Field(gt=0)] = 256
    concurrency: Annotated[int, Field(gt=0)] = 4
    """Maximum number of sandboxes; further rewards wait, which counts towards their time limit."""

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self, row: dict[str, Any]) -> None:
        self._tests(row)

    async def __call__(self, prediction: str, **row: Any) -> dict[str, float]:
        code, tests = code_of(prediction), self._tests(row)
        calls = [test for test in tests if isinstance(test, CallTest)]
        passed, goes_on = await self._call(code, calls) if calls else (0, True)
        for test in tests:
            if goes_on and isinstance(test, ProgramTest):
                result = await self._run(code, test.input)
                good = result.status == 0 and not result.timed_out and same_text(result.stdout, test.output)
                passed += good
                goes_on = good or (self.partial and not result.timed_out)
        success = float(passed == len(tests))
        share = passed / len(tests)
        return {"reward": share if self.partial else success, "success": success, "tests_passed": share}

    def _tests(self, row: dict[str, Any]) -> list[ProgramTest | CallTest]:
        tests = field_of(row, self.field)
        try:
            return read_tests(tests)
        except (ValueError, SyntaxError) as error:
            raise ValueError(f"cannot read the field {self.field!r}: {error}") from error

    async def _call(self, code: str, tests: list[CallTest]) -> tuple[int, bool]:
        calls = [(test.function, test.args, test.kwargs) for test in tests]
        # the arguments are Python, not JSON, because functions distinguish tuples from lists
        harness = inspect.getsource(call_harness)
        result = await self._run(f"{harness}\ninf, nan = float('inf'), float('nan')\nrun({code!r}, {calls!r})\n")
        claims = {}
        for line in result.stdout.splitlines():
            try:
                number, value = json.loads(line)
            except (ValueError, TypeError, RecursionError):  # boundary: a program may print anything
                continue
            if isinstance(number, int):
                claims[number] = value
        expected = [call_harness.comparable(test.output) for test in tests]
        passed = sum(n in claims and same_value(claims[n], output) for n, output in enumerate(expected))
        return passed, passed == len(tests) or (self.partial and not result.timed_out)

    async def _run(self, program: str, stdin: str = "") -> ScriptResult:
        # notebooks run several event loops in succession
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._places = asyncio.Semaphore(self.concurrency)
        async with self._places:
            return await run_script(program, stdin, seconds=self.seconds, memory_mb=self.memory_mb)


def same_text(printed: str, expected: str) -> bool:
    """Return whether the lines are equal, ignoring trailing whitespace of lines and trailing empty lines."""
    lines, wanted = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return lines == wanted


def same_value(value: Any, expected: Any) -> bool:
    """Return whether two comparable values are equal; floats within a relative 1e-6 or an absolute 1e-9."""
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        same_keys = isinstance(value, dict) and value.keys() == expected.keys()
        return same_keys and all(same_value(value[key], expected[key]) for key in expected)
    numbers = isinstance(value, (int, float)) and isinstance(expected, (int, float))
    if numbers and float in (type(value), type(expected)):
        try:
            return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
        except OverflowError:
            return False
    return bool(value == expected)

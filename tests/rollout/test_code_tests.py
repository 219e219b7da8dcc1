"""`code_tests`: programs in the real sandbox, and a verdict that they cannot forge."""

import asyncio
import json
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.rewards.code_tests import CodeTests, code_of, same_text, same_value

ADD = "def add(a, b):\n    return a + b\n"
CALLS = [{"function": "add", "args": [1, 2], "output": 3}, {"function": "add", "args": [[1], [2]], "output": [1, 2]}]
SUMS = [{"input": "1 2\n", "output": "3"}, {"input": "5 6\n", "output": "11\n"}]


async def judge(code: str, tests: Any, **options: Any) -> dict[str, float]:
    return await CodeTests(**options)(f"Here it is:\n```python\n{code}\n```\nDone.", tests=tests)


def verdict(reward: float, passed: float) -> dict[str, float]:
    return {"reward": reward, "success": float(passed == 1), "tests_passed": passed}


@pytest.mark.processes
async def test_programs_read_and_print() -> None:
    assert await judge("print(sum(map(int, input().split())))", SUMS) == verdict(1.0, 1.0)
    assert await judge("print(input() and 3)", SUMS) == verdict(0.0, 0.5)
    assert await judge("print(input() and 3)", SUMS, partial=True) == verdict(0.5, 0.5)
    # nothing runs after the first failure, unless fractional rewards are requested
    assert await judge("print(input() and 11)", SUMS) == verdict(0.0, 0.0)
    assert await judge("print(input() and 11)", SUMS, partial=True) == verdict(0.5, 0.5)
    assert await judge("print(sum(map(int, input().split()))); raise SystemExit(1)", SUMS) == verdict(0.0, 0.0)


@pytest.mark.processes
async def test_functions_are_called() -> None:
    assert await judge(ADD, CALLS) == verdict(1.0, 1.0)
    assert await judge(ADD, json.dumps(CALLS)) == verdict(1.0, 1.0)
    assert await judge("print('noise')\n" + ADD.replace("+", "-"), CALLS, partial=True) == verdict(0.0, 0.0)
    assert await judge("def add(a, b): return 3", CALLS, partial=True) == verdict(0.5, 0.5)
    assert await judge("def add(a, b): return a.b", CALLS) == verdict(0.0, 0.0)
    assert await judge("def add(a, b)", CALLS) == verdict(0.0, 0.0)
    quits, tests = ADD + "    \ndef quit(): raise SystemExit", [{"function": "quit"}, *CALLS[:1]]
    assert await judge(quits, tests, partial=True) == verdict(0.5, 0.5)
    method = [{"function": "Solution.add", "kwargs": {"a": 1, "b": 2}, "output": 3}]
    assert await judge("class Solution:\n    def add(self, a, b): return a + b", method) == verdict(1.0, 1.0)
    assert await judge(ADD + "if __name__ == '__main__':\n    raise SystemExit(input())", CALLS) == verdict(1.0, 1.0)


@pytest.mark.processes
async def test_assertions_are_judged_outside() -> None:
    tests = [
        "assert swap((1, 'a')) == ('a', 1)",
        "assert swap(pair=(1, {2})) == ({2}, 1)",
        "assert swap((0.1, 3)) == (3, 0.1)",
        "assert swap((None, {1: True})) == ({1: True}, None)",
    ]
    swap = "def swap(pair):\n    assert type(pair) is tuple\n    return pair[1], pair[0] * 1"
    assert await judge(swap.replace(" * 1", ""), tests) == verdict(1.0, 1.0)
    assert await judge(swap, tests, partial=True) == verdict(0.75, 0.75)


FORGERIES = [
    "import os; os._exit(0)",
    "raise SystemExit(0)",
    "import builtins, sys\nprint('[0, 3]'); print('[1, [1, 2]]')\nsys.exit(0)",
    "class Any:\n    __eq__ = lambda *a: True\n    __hash__ = None\ndef add(a, b): return Any()",
    "class Int(int):\n    __eq__ = lambda *a: True\n    __hash__ = None\ndef add(a, b): return Int(0)",
    "import json\njson.dumps = lambda value: 'true'\ndef add(a, b): return 0",
    "import sys\nsys.modules['__main__'].comparable = lambda value: 0\ndef add(a, b): return 0",
    "def add(a, b):\n    import os\n    os.write(3, b'[0, null]\\n' * 1000); os._exit(0)",
    "def add(a, b):\n    raise KeyboardInterrupt",
]


@pytest.mark.processes
@pytest.mark.parametrize("code", FORGERIES)
async def test_a_verdict_cannot_be_forged(code: str) -> None:
    assert await judge(code, CALLS) == verdict(0.0, 0.0)


@pytest.mark.processes
async def test_a_solution_does_not_find_what_is_expected() -> None:
    """It searches its whole process and its files for 8675309, which its own code does not contain literally."""
    snoop = """
import gc, os
def add(a, b):
    seen = [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
    seen += [open(os.path.join(folder, f), errors="replace").read() for folder, _, files in os.walk(".") for f in files]
    secret = "867" + str(5309)
    return any(secret in text for text in seen)
"""
    expected = {"function": "add", "args": [1, 1], "output": "8675309"}
    finds_nothing = {"function": "add", "args": [1, 2], "output": False}
    assert await judge(snoop, [expected, finds_nothing], partial=True) == verdict(0.5, 0.5)
    # the search works: it finds an argument
    found = {"function": "add", "args": ["8675309", 1], "output": True}
    assert await judge(snoop, [found]) == verdict(1.0, 1.0)


@pytest.mark.processes
async def test_a_program_that_takes_too_long_is_stopped_and_no_other_is_run() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    assert await judge("while True: pass", SUMS * 20, partial=True, seconds=0.5) == verdict(0.0, 0.0)
    assert loop.time() - started < 10
    hang = "def add(a, b):\n    while a == [1]: pass\n    return a + b"
    fails = [{**CALLS[0], "output": 4}, {"input": "", "output": ""}]
    assert await judge(ADD, fails) == verdict(0.0, 0.0)
    assert await judge(ADD, fails, partial=True) == verdict(0.5, 0.5)
    assert await judge(hang, [*CALLS, *SUMS], partial=True, seconds=1.5) == verdict(0.25, 0.25)


def test_code_is_found_in_a_message() -> None:
    found = {
        **{"x = 1": "x = 1", "```python\nx = 1\n```": "x = 1\n", "```python\nx = 1": "x = 1", "": ""},
        "```py\nx = 1\n```\nor\n```\nx = 2\n```\nwhich prints\n```text\n2\n```": "x = 2\n",
        "```text\n1\n```\nThen\n```Python3\nx = 1\n```": "x = 1\n",
        "say ```x``` twice": "say ```x``` twice",
    }
    assert {prediction: code_of(prediction) for prediction in found} == found


OUTSIDE = "cannot be checked outside the sandbox; write"


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        *((None, "must be a list of tests"), ([], "must be a list of tests"), ("[", "cannot read the field 'tests'")),
        *(([{"input": "1"}], "is neither"), ([{"input": "1", "output": "1", "function": "f"}], "is neither")),
        *(([3], "is neither"), (["assert f(x) == 1"], "cannot read the field 'tests'")),
        *((["assert f(1)"], OUTSIDE), (["assert f(1) < 2"], OUTSIDE), (["assert f(**{'a': 1}) == 2"], OUTSIDE)),
        *((["assert f(1) == 1; assert f(2) == 2"], OUTSIDE), (["f(1) = 1"], "cannot read the field 'tests'")),
    ],
)
def test_tests_that_cannot_be_judged_are_told_before_the_run(tests: Any, message: str) -> None:
    rewards = Rewards(["code_tests"])
    with pytest.raises(SettingError, match=message):
        rewards.check({"tests": tests})
    with pytest.raises(SettingError, match="needs the field 'tests'"):
        rewards.check({"question": "q"})


def test_what_counts_as_the_same() -> None:
    assert same_text("1 \n2\n\n", "1\n2")
    assert same_text("", "\n")
    assert not same_text("1\n\n2", "1\n2")
    assert not same_text(" 1", "1")
    assert same_value([1, {"a": 0.1 + 0.2}], [1, {"a": 0.3}])
    assert same_value(1, 1.0)
    assert same_value(1_000_000.1, 1_000_000.2)
    assert same_value(1e-12, 0)
    assert not same_value(1.00001, 1.0)
    assert same_value(float("inf"), float("inf"))
    for value, expected in (("1", 1), ([1], 1), (1, [1]), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (0.31, 0.3)):
        assert not same_value(value, expected)
    assert not same_value(10**400, 0.5)

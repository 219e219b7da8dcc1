"""Equality of mathematical answers, checked by math-verify in processes that can be killed."""

import json
import subprocess
import threading
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agentfactory.rollout.rewards.decorator import reward
from agentfactory.rollout.rewards.reward_spec import RewardError
from agentfactory.rollout.rewards.text import OPTIONS, Pattern, accepted_answers, extracted
from agentfactory.tools.import_path import is_installed, own_python


@reward
@dataclass(config=OPTIONS)
class MathEqual:
    """1 if math-verify considers prediction and answer equal, else 0; metrics `success` and `math_timeout`.

    A prediction on which sympy takes too long counts as not equal, as in math-verify, and sets `math_timeout`. If an
    answer in the data cannot be read, this is an error of the reward.
    """

    field: str = "answer"
    """Field of the row: a bare expression (LaTeX with or without $, or a number), or a list of accepted ones."""
    extract: Pattern | None = None
    """The part of the prediction to compare, such as `<answer>(.*?)</answer>`: the first group of the last match, which
    must be a bare expression. null: the last expression that math-verify finds."""
    extract_answer: Pattern | None = None
    """The part of the field to compare, such as `#### (.*)` in GSM8K."""
    strict: bool = False
    """Accept only what the prediction marks as its answer in LaTeX: \\boxed{...}, or after "the answer is"."""
    seconds: Annotated[float, Field(gt=0)] = 5.0
    """Time limit of one comparison."""
    processes: Annotated[int, Field(gt=0)] = 2
    """Number of processes that compare, of about 100 MB each; further rewards wait, which counts towards their time
    limit."""

    @model_validator(mode="after")
    def _can_work(self) -> "MathEqual":
        if not is_installed("math_verify"):
            raise ValueError("math_equal needs a package that is not installed: pip install math-verify")
        if self.strict and self.extract is not None:
            raise ValueError("give strict or extract, not both")
        return self

    def __post_init__(self) -> None:
        self._places = threading.BoundedSemaphore(self.processes)
        self._idle: list[_Process] = []

    def check(self, row: dict[str, Any]) -> None:
        """Raise ValueError if the row has no answer."""
        accepted_answers(row, self.field, self.extract_answer)

    def __call__(self, prediction: str, **row: Any) -> dict[str, float]:
        request = {
            "prediction": extracted(self.extract, prediction),
            "answers": accepted_answers(row, self.field, self.extract_answer),
            "bare": self.extract is not None,
            "strict": self.strict,
            "seconds": self.seconds,
        }
        # blocking, because it runs in a thread, independently of any event loop
        with self._places:
            process = self._idle.pop() if self._idle else _Process()
            try:
                equal = process.compare(request)
            finally:
                if process.waits:
                    self._idle.append(process)
                else:
                    process.end()
        return {"reward": float(equal or False), "success": float(equal or False), "math_timeout": float(equal is None)}

    def close(self) -> None:
        """End the processes; the next comparison starts new ones."""
        while self._idle:
            self._idle.pop().end()


class _Process:
    """One `math_process`; `waits` says whether it can take a request. Raises RewardError if it does not start."""

    def __init__(self) -> None:
        command = own_python("-m", "agentfactory.rollout.rewards.math_process")
        # a separate session, so that Ctrl-C in a terminal does not reach it
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.waits = self._read() is not None
        if not self.waits:
            self.end()
            raise RewardError("the process that compares did not start; what it said is in the log")

    def compare(self, request: dict[str, Any]) -> bool | None:
        """Return whether they are equal; None if the prediction took too long. Raises RewardError if no answer can be
        read, or if reading them takes too long."""
        self.waits = False
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        known = self._read()
        verdict = known and self._read()
        self.waits = verdict is not None
        answers = str(request["answers"])[:300]
        if known is None:
            raise RewardError(f"the answers {answers} took longer than {request['seconds']:g} s to read")
        if not known["answers"]:
            raise RewardError(f"math-verify can read none of the answers {answers}")
        return None if verdict is None else verdict["equal"]

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

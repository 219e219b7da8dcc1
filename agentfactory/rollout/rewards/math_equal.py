"""Equality of mathematical answers, by math-verify in processes that may be lost."""

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
    """1 where math-verify holds prediction and answer for equal, else 0; metrics `success` and `math_timeout`.

    A prediction on which sympy takes too long is not equal, as math-verify has it; the metric tells. An answer of the
    data that cannot be read is an error of the reward.
    """

    field: str = "answer"
    """Of the row: an expression alone (LaTeX with or without $, or a number), or a list of them, each of which is
    right."""
    extract: Pattern | None = None
    """What of the prediction counts, such as `<answer>(.*?)</answer>`: the first group of the last match, which is an
    expression alone. null: the last expression that math-verify finds."""
    extract_answer: Pattern | None = None
    """What of the field counts, such as `#### (.*)` in GSM8K."""
    strict: bool = False
    """Let only count what the prediction marks as its answer, in LaTeX: \\boxed{...}, or after "the answer is"."""
    seconds: Annotated[float, Field(gt=0)] = 5.0
    """Time limit of one comparison."""
    processes: Annotated[int, Field(gt=0)] = 2
    """Processes that compare, of about 100 MB each; further verdicts wait, and their time limit runs."""

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
        """Raises ValueError where the row has no answer."""
        accepted_answers(row, self.field, self.extract_answer)

    def __call__(self, prediction: str, **row: Any) -> dict[str, float]:
        request = {
            "prediction": extracted(self.extract, prediction),
            "answers": accepted_answers(row, self.field, self.extract_answer),
            "bare": self.extract is not None,
            "strict": self.strict,
            "seconds": self.seconds,
        }
        # blocking, because it runs in a thread: no tie to one event loop
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
        """End the processes; the next verdict starts new ones."""
        while self._idle:
            self._idle.pop().end()


class _Process:
    """One `math_process`; `waits` tells whether it can take a request. Raises RewardError where it does not start."""

    def __init__(self) -> None:
        command = own_python("-m", "agentfactory.rollout.rewards.math_process")
        # a session of its own, so that Ctrl-C in a terminal does not reach it
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.waits = self._read() is not None
        if not self.waits:
            self.end()
            raise RewardError("the process that compares did not start; what it said is in the log")

    def compare(self, request: dict[str, Any]) -> bool | None:
        """Whether they are equal; None where the prediction took too long. Raises RewardError where no answer can be
        read, or reading them takes too long."""
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
        """End it now."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

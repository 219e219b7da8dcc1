"""Equality of mathematical answers, checked by math-verify in processes that can be killed."""

from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agentfactory.base.processes.killable import KillableProcesses
from agentfactory.base.user_code.extras import check_extra
from agentfactory.rollout.rewards.answers import ShortAnswers, hit_or_miss
from agentfactory.rollout.rewards.reward_spec import RewardError, reward
from agentfactory.rollout.rewards.text import OPTIONS
from agentfactory.tools.sandbox.program import start_confined

_PROCESS = "agentfactory.rollout.rewards.math_comparison"


@reward
@dataclass(config=OPTIONS)
class MathEqual(ShortAnswers):
    """1 if math-verify considers prediction and answer equal, else 0; metrics `success` and `math_timeout`. Answers,
    and the part of the prediction that `extract` finds, are bare expressions (LaTeX with or without $, or a number).
    Without `extract`, the last expression that math-verify finds is compared. A prediction on which sympy takes too
    long counts as not equal, as in math-verify, and sets `math_timeout`. An answer in the data that cannot be parsed is
    an error of the reward."""

    strict: bool = False
    """Accept only an expression marked as the answer in LaTeX: \\boxed{...}, or after "the answer is"."""
    seconds: Annotated[float, Field(gt=0)] = 5.0
    processes: Annotated[int, Field(gt=0)] = 2
    """Number of comparison processes, of about 100 MB each; further rewards wait, within their time limit."""

    @model_validator(mode="after")
    def _can_work(self) -> "MathEqual":
        check_extra("rewards")
        if self.strict and self.extract is not None:
            raise ValueError("set strict or extract, not both")
        return self

    def __post_init__(self) -> None:
        self._processes = KillableProcesses(_PROCESS, self.processes, start=start_confined)

    def __call__(self, prediction: str, **row: Any) -> dict[str, float]:
        request = {
            "prediction": self._found(prediction),
            "answers": self._accepted(row),
            "bare": self.extract is not None,
            "strict": self.strict,
            "seconds": self.seconds,
        }
        try:
            with self._processes.borrowed() as process:
                process.send(request)
                known = process.receive()
                verdict = known and process.receive()
                process.answered = verdict is not None
        except ChildProcessError as error:
            raise RewardError(str(error)) from error
        answers = str(request["answers"])[:300]
        if known is None:
            raise RewardError(f"the answers {answers} took longer than {request['seconds']:g} s to parse")
        if not known["answers"]:
            raise RewardError(f"math-verify cannot parse any of the answers {answers}")
        equal = None if verdict is None else verdict["equal"]
        return {**hit_or_miss(bool(equal)), "math_timeout": float(equal is None)}

    def close(self) -> None:
        """End the processes; the next comparison starts new ones."""
        self._processes.close()

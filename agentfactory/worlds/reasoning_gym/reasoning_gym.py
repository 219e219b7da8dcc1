"""The world `reasoning_gym`: no tools; its reward is the score that reasoning-gym's verifier gives the final answer."""

import logging
import os
from typing import Any

from agentfactory.base.processes.killable import KillableProcesses
from agentfactory.base.run_notices import notify
from agentfactory.base.user_code.extras import check_extra
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.sandbox.program import start_confined
from agentfactory.worlds.reasoning_gym.gym_tasks import PROCESS, VARIABLES
from agentfactory.worlds.shared import Shared

logger = logging.getLogger(__name__)

_PROCESSES = min(8, max(2, os.cpu_count() or 2))
_MOST_CHARACTERS = 100_000
"""Of an answer. The longest stored ones have some thousand."""
_FIELDS = {"name": str, "level": int | None, "options": dict, "seed": int, "size": int, "index": int}
_verifiers: Shared[KillableProcesses] = Shared()


class VerifierError(Exception):
    """A verifier that fails for its own answer, or a task that cannot be verified: the model is not to blame."""


class ReasoningGym(Environment):
    """A task of reasoning-gym, whose verifier scores the text in the last <answer>...</answer> of the final message.

    Args:
        seconds: Time limit of a verifier; an answer that takes longer scores 0.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._processes = _verifiers.acquire(
            "all", lambda: KillableProcesses(PROCESS, _PROCESSES, variables=VARIABLES, start=start_confined)
        )

    @classmethod
    def check_machine(cls) -> None:
        check_extra("reasoning-gym")

    @classmethod
    def check_data_row(cls, row: dict[str, Any], has_rewards: bool) -> None:
        """Raise ValueError if the row is none of `data.reasoning_gym`."""
        task = row["reasoning_gym"]
        given = task if isinstance(task, dict) else {}
        if not all(isinstance(given.get(name, ...), kind) for name, kind in _FIELDS.items()):
            raise ValueError(f"reasoning_gym: got {task!r}; use rows that data.reasoning_gym gave, unchanged")

    def reset(self, question: str, reasoning_gym: dict[str, Any]) -> None:
        """Begin a task: two fields of a row of `data.reasoning_gym`."""
        self._question, self._task = question, reasoning_gym

    def reward(self, prediction: str) -> dict[str, float]:
        """Return the verifier's score; `success` is 1 for a full one. Raise VerifierError if the verifier is broken."""
        answer = _last_answer(prediction)
        score = 0.0 if answer is None or len(answer) > _MOST_CHARACTERS else self._score(answer)
        return {"reward": score, "success": float(score == 1.0), "answered": float(answer is not None)}

    def close(self) -> None:
        if (processes := _verifiers.release("all")) is not None:
            processes.close()

    def _score(self, answer: str) -> float:
        own, verdict = self._ask(answer)
        if "score" in verdict:
            return float(verdict["score"])
        name = self._task["name"]
        if own is not None and (again := self._ask(own)[1]).get("score") != 1.0:
            raise VerifierError(f"the verifier of {name} {_told(again)} for its own answer {own[:80]!r}")
        text = f"the verifier of {name} {_told(verdict)} for an answer of the model, which scores 0"
        notify(logger, f"verifier of {name}", f"reasoning_gym: {text}; such an answer is {answer[:80]!r}")
        return 0.0

    def _ask(self, answer: str) -> tuple[str | None, dict[str, Any]]:
        """Return the task's own answer and the verdict: `score`, `raised`, or `late` with the time limit."""
        request = {"task": self._task, "question": self._question, "answer": answer, "seconds": self._seconds}
        with self._processes.borrowed() as process:
            process.send(request)
            told = process.receive()
            verdict = told and "own" in told and process.receive()
            process.answered = bool(verdict) or (told is not None and "problem" in told)
        name, index = self._task["name"], self._task["index"]
        if told is None:
            raise VerifierError(f"task {index} of {name} could not be generated again in 60 s and 4 GiB")
        if "problem" in told:
            raise VerifierError(f"task {index} of {name}: {told['problem']}; fix: make the rows with this version")
        return told["own"], verdict or {"late": self._seconds}


def _last_answer(text: str) -> str | None:
    for part in reversed(text.split("</answer>")[:-1]):
        _, tag, answer = part.partition("<answer>")
        if tag:
            return answer.strip()
    return None


def _told(verdict: dict[str, Any]) -> str:
    if "late" in verdict:
        return f"took longer than {verdict['late']:g} s, or too much memory,"
    return f"raised {verdict['raised']}" if "raised" in verdict else f"gave {verdict['score']:g}"

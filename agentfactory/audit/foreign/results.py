"""Rows of verifiers up to 0.3: results.jsonl, and prime-rl's first rollout files.

Read from the source of verifiers 0.1.14 (utils/save_utils.py: `state_to_output`; types.py: `RolloutOutput`).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from agentfactory.audit.foreign.files import convert
from agentfactory.audit.foreign.messages import messages_of, named
from agentfactory.rollout.trajectory import Outcome, StopReason, Trajectory

_BLAME = {
    "ModelError": Outcome.INFERENCE_ERROR,
    "InvalidModelResponseError": Outcome.INFERENCE_ERROR,
    "EmptyModelResponseError": Outcome.INFERENCE_ERROR,
    "OverlongPromptError": Outcome.CONTEXT_OVERFLOW,
    "InfraError": Outcome.TOOL_INFRASTRUCTURE,
    "SandboxError": Outcome.TOOL_INFRASTRUCTURE,
    "TunnelError": Outcome.TOOL_INFRASTRUCTURE,
}
"""Name of an error -> outcome; AGENT_ERROR for others."""
_STOPS = {
    "max_turns_reached": (Outcome.MAX_TURNS, StopReason.MAX_TURNS),
    "prompt_too_long": (Outcome.CONTEXT_OVERFLOW, StopReason.CONTEXT_OVERFLOW),
    "max_total_completion_tokens_reached": (Outcome.MAX_TOKENS, StopReason.MAX_TOKENS),
}


class Result(msgspec.Struct):
    """A saved rollout. `error` was a text in the first versions."""

    prompt: Any
    completion: Any
    reward: float | None = None
    example_id: int | str = 0
    answer: Any = None
    info: Any = None
    task: Any = None
    error: dict[str, Any] | str | None = None
    is_truncated: bool = False
    stop_condition: str | None = None
    metrics: dict[str, float | None] | None = None
    env_id: str | None = None


def is_result(row: Mapping[str, Any]) -> bool:
    """Return whether a line holds such a row."""
    return {"prompt", "completion", "reward"} <= row.keys()


def result_of(row: dict[str, Any]) -> Result:
    """Return the rollout of a line. Raise ValueError if there is none."""
    result: Result = convert(row, Result)
    return result


def chain_of(result: Result, name: str) -> Trajectory:
    """Return the chain of a rollout, which has no rows, because no tokens are saved."""
    completion = messages_of(result.completion, "assistant")
    outcome, reason = _outcome(result)
    error = result.error.get("error_chain_repr") if isinstance(result.error, dict) else result.error
    return Trajectory(
        name,
        named([*messages_of(result.prompt, "user"), *completion]),
        [],
        outcome,
        reward=result.reward,
        metrics={key: value for key, value in (result.metrics or {}).items() if value is not None},
        turns=sum(message["role"] == "assistant" for message in completion),
        error=str(error) if error else None,
        stop_reason=reason,
    )


def task_of(result: Result) -> dict[str, Any]:
    """Return the row of the data set, as far as it is saved."""
    found = {"prompt": result.prompt, "answer": result.answer, "info": result.info, "task": result.task}
    return {name: value for name, value in found.items() if value is not None}


def _outcome(result: Result) -> tuple[Outcome, StopReason | None]:
    if result.error:
        kind = result.error.get("error") if isinstance(result.error, dict) else result.error.split("(")[0]
        return _BLAME.get(str(kind), Outcome.AGENT_ERROR), None
    if result.stop_condition in _STOPS:
        return _STOPS[result.stop_condition]
    if (result.stop_condition or "").startswith("timeout"):
        return Outcome.TIMEOUT, None
    if result.is_truncated:
        return Outcome.MAX_TOKENS, StopReason.MAX_TOKENS
    return Outcome.COMPLETED, StopReason.ANSWER

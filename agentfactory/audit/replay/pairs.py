"""Continuations as rows of data: preferences, transcripts, credit of turns."""

from collections.abc import Sequence
from typing import Any

from agentfactory.audit.replay.decisive_turns import TurnEffect
from agentfactory.audit.replay.saved_turns import own_messages
from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.trajectory import Trajectory

KINDS = ("preferences", "sft", "credit")


def preference(
    saved: Trajectory, turns: int, chains: Sequence[Trajectory], specs: Sequence[ToolSpec]
) -> dict[str, Any]:
    """Return the best and the worst of several continuations after the first `turns` turns of a chain, in TRL's
    conversational format with `prompt`, `chosen` and `rejected`. Raises ValueError if their rewards are equal, or if
    they do not share the prompt."""
    prompt = saved.messages[: own_messages(saved)[turns]]
    sharing = [chain for chain in chains if chain.messages[: len(prompt)] == prompt]
    if not sharing:
        raise ValueError("no continuation has the prompt of the saved chain: the change was made before it")
    best, worst = max(sharing, key=_reward), min(sharing, key=_reward)
    if _reward(best) == _reward(worst):
        raise ValueError(f"all continuations have the reward {_reward(best):g}: there is no better one")
    chosen, rejected = best.messages[len(prompt) :], worst.messages[len(prompt) :]
    rewards = {"chosen_reward": _reward(best), "rejected_reward": _reward(worst)}
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tools": _tools(specs), **rewards}


def transcript(chains: Sequence[Trajectory], specs: Sequence[ToolSpec]) -> dict[str, Any]:
    """Return the best chain as a row for supervised fine-tuning."""
    best = max(chains, key=_reward)
    return {"messages": best.messages, "tools": _tools(specs), "reward": _reward(best)}


def credit(saved: Trajectory, effects: Sequence[TurnEffect], specs: Sequence[ToolSpec]) -> dict[str, Any]:
    """Return a chain with the change of the expected result that each of its turns made."""
    values = [effect.effect for effect in effects]
    return {"messages": saved.messages, "tools": _tools(specs), "turn_rewards": values, "reward": saved.reward}


def _reward(chain: Trajectory) -> float:
    assert chain.reward is not None
    return chain.reward


def _tools(specs: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    return [spec.to_openai() for spec in specs]

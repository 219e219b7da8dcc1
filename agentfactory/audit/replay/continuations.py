"""Continuations of a saved chain, sampled after its first turns in the same state of its environment: their results,
the effect of each turn on them, and rows of data."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from agentfactory.audit.replay.prefix import Change, PrefixHooks, anchors_differ
from agentfactory.audit.replay.replay_runner import own_messages
from agentfactory.base.messages import ToolCall, ToolResult, ToolSpec
from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.chains.tool_loop import ToolLoop, Turns
from agentfactory.rollout.data import Task
from agentfactory.rollout.evaluation.pass_at_k import Interval, Share, of_mean, of_proportion
from agentfactory.rollout.trajectory import StopReason, Trajectory
from agentfactory.tools.sessions.tool_session import ToolSession


class ReplayError(Exception):
    """A chain cannot be played again up to a turn; the message says what is different."""


@dataclass(frozen=True)
class Results:
    """Continuations, and the mean of their success (of their reward, if they report none) with its interval."""

    chains: Sequence[Trajectory]
    figure: str
    mean: float
    interval: Interval | None


class _ChangedSession:
    """A chain's session whose results at one turn have another text. The calls are still made."""

    def __init__(self, session: Any, episode: Episode, turn: int, text: str) -> None:
        self._session, self._episode, self._turn, self._text = session, episode, turn, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def call(self, call: ToolCall, seconds: float | None = None) -> ToolResult:
        result: ToolResult = await self._session.call(call, seconds)
        if self._episode.trajectory.turns - 1 != self._turn:
            return result
        return replace(result, content=self._text, error=None)


class _ChangedLoop(ToolLoop):
    """A tool loop with a changed result after its turn number `turn`, from 0."""

    def __init__(self, episode: Episode, turns: Turns, turn: int, text: str) -> None:
        super().__init__(episode, turns)
        self.turn, self.text = turn, text

    async def act(self, session: ToolSession) -> StopReason:
        changed = _ChangedSession(session, self.episode, self.turn, self.text)
        return await super().act(cast(ToolSession, changed))


class _ReplayingRunner(ChainRunner):
    def player(self, episode: Episode) -> ToolLoop:
        loop, hooks = super().player(episode), self.agent
        assert isinstance(loop, ToolLoop)
        assert isinstance(hooks, PrefixHooks)
        if hooks.change.result is None:
            return loop
        return _ChangedLoop(loop.episode, loop.turns, hooks.turns - 1, hooks.change.result)


async def continuations(
    runner: ChainRunner,
    saved: Trajectory,
    task: Task,
    turns: int,
    samples: int,
    model: str,
    change: Change | None = None,
) -> Results:
    """Play the first `turns` turns of a saved chain again, with a change, and sample the rest `samples` times by the
    weights called `model`. Raises ReplayError if the beginning is not the saved one, or if no continuation ends."""
    hooks = PrefixHooks(saved, turns, change or Change())
    setup, rewards = runner.setup, runner.rewards
    one = _ReplayingRunner(setup.recipe, runner.renderer, runner.client, runner.toolset, rewards, hooks)
    one.places = runner.places
    if hooks.change.system is not None:
        rollout = one.setup.recipe.rollout.model_copy(update={"system_prompt": hooks.change.system})
        one.setup = replace(one.setup, recipe=one.setup.recipe.model_copy(update={"rollout": rollout}))
    temperature = one.setup.config.temperature
    chains = await asyncio.gather(
        *(
            one.run(f"{saved.id}@{turns}.{number}", task, Sampling(model, temperature, f"replay/{turns}/{number}"))
            for number in range(samples)
        )
    )
    if hooks.diverged is not None:
        raise ReplayError(f"the chain does something else when it is played again: {hooks.diverged}")
    known = turns - 1 if hooks.change.actions and turns - 1 in hooks.change.actions else turns
    for chain in chains if hooks.change.is_exact else ():
        if (differing := anchors_differ(chain, saved, known)) is not None:
            raise ReplayError(differing)
    return results_of(chains)


def results_of(chains: Sequence[Trajectory]) -> Results:
    """Return the mean success of chains, or their mean reward. Raises ReplayError if none has a reward."""
    ended = [chain for chain in chains if chain.reward is not None]
    if not ended:
        errors = sorted({f"{chain.outcome}: {chain.error}" for chain in chains})
        raise ReplayError(f"no continuation has a reward: {errors[0] if errors else 'there is none'}")
    figure = "success" if all("success" in chain.metrics for chain in ended) else "reward"
    values = [chain.metrics["success"] if figure == "success" else float(chain.reward or 0.0) for chain in ended]
    shares = [Share(value, 1.0) for value in values]
    within = all(0.0 <= value <= 1.0 for value in values)
    interval = of_proportion(shares) if within else of_mean(shares)
    return Results(ended, figure, sum(values) / len(values), interval)


@dataclass(frozen=True)
class TurnEffect:
    """The results of continuations before and after a turn; after the last one, the chain's own result."""

    turn: int
    before: Results
    after: Results

    @property
    def effect(self) -> float:
        return self.after.mean - self.before.mean


async def turn_effects(
    runner: ChainRunner, saved: Trajectory, task: Task, samples: int, model: str
) -> list[TurnEffect]:
    """Return the effect of each turn, from `samples` continuations before each. Raises as `continuations` does."""
    values = [await continuations(runner, saved, task, turns, samples, model) for turns in range(saved.turns)]
    values.append(results_of([saved]))
    return [TurnEffect(turn + 1, values[turn], values[turn + 1]) for turn in range(saved.turns)]


def ranked(effects: list[TurnEffect]) -> list[TurnEffect]:
    """Return turns by how much the outcome hung on them: for a chain that did worse than was expected at its beginning,
    or failed as was expected, those that lost most come first, otherwise those that gained most."""
    if not effects:
        return []
    begin, end = effects[0].before.mean, effects[-1].after.mean
    # a chain that failed, as was expected, has lost what it had gained in between
    lost = end < begin or (end == begin and end < 1.0)
    return sorted(effects, key=lambda one: (one.effect if lost else -one.effect, one.turn))


KINDS = ("preferences", "sft", "credit")


def preference(
    saved: Trajectory, turns: int, chains: Sequence[Trajectory], specs: Sequence[ToolSpec]
) -> dict[str, Any]:
    """Return the best and the worst of several continuations after the first `turns` turns of a chain, in TRL's
    conversational format. Raises ValueError if their rewards are equal, or if they do not share the prompt."""
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

"""The turns of a chain on which its outcome hung: the change of the expected result that each made."""

from dataclasses import dataclass

from agentfactory.audit.replay.continuations import Results, continuations, results_of
from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.data import Task
from agentfactory.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class TurnEffect:
    """A turn, numbered from 1: the results of continuations before and after it. `effect` is the difference of their
    means, and after the last turn of the chain's own result."""

    turn: int
    before: Results
    after: Results

    @property
    def effect(self) -> float:
        """The change of the expected result."""
        return self.after.mean - self.before.mean


async def turn_effects(
    runner: ChainRunner, saved: Trajectory, task: Task, samples: int, model: str
) -> list[TurnEffect]:
    """Return the effect of each turn of a chain, in order, from `samples` continuations before each of them. Raises
    ReplayError as `continuations` does."""
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

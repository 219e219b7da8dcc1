"""A runner that plays saved chains again, with their own turns, in the recipe's tools and environments."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from agentfactory.base.messages import Message
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.chains.chain_runner import Runner, begin
from agentfactory.rollout.chains.context import Context
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.chains.tool_loop import TakenTurn, ToolLoop
from agentfactory.rollout.data import Task
from agentfactory.rollout.inference.http_transport import ContextOverflowError
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.trajectory import Outcome, Trajectory
from agentfactory.tools.sessions.toolset import Toolset


class DivergedError(Exception):
    """The chain that is played again does something else than the saved one; the message says what."""


class SavedTurns:
    """The turns of a saved chain, parsed again from their tokens; see Turns. Messages that come between them must be
    the saved ones: the first that differs raises DivergedError, as does a turn after the last."""

    def __init__(self, episode: Episode, renderer: Renderer, saved: Trajectory) -> None:
        self.episode, self.renderer, self.saved = episode, renderer, saved
        self.context = Context([])
        self._turn = 0
        self._own = own_messages(saved)

    def begin(self, opening: list[Message]) -> None:
        self.context = Context(opening)
        self._compare(opening, self.saved.messages[: self._own[0]] if self._own else self.saved.messages, "the opening")

    async def take(self, anchor: str | None) -> TakenTurn:
        if self._turn == self.saved.turns:
            raise DivergedError(f"it has not ended after turn {self._turn}, and the saved one has")
        row, start, end = self.saved.turn_spans()[self._turn]
        sampled = [int(token) for token in self._ids(row, start, end)]
        parsed = self.renderer.parse(sampled, self.episode.counts["tool_calls"], specs=self.episode.setup.specs)
        cut = was_cut(sampled, self.renderer)
        self._turn += 1
        self.episode.note_turn(end - start, anchor)
        self.episode.trajectory.messages.append(parsed.message)
        self.context.say(parsed.message)
        return TakenTurn(parsed, cut, end - start)

    def _ids(self, row: int, start: int, end: int) -> Sequence[int]:
        # the forced beginning of a turn is part of what is parsed
        prefix = self.episode.setup.config.assistant_prefix
        before = len(self.renderer.encode(prefix)) if prefix else 0
        ids: Sequence[int] = self.saved.rows[row].token_ids[start - before : end]
        return ids

    async def go_on(self, answers: list[Message]) -> None:
        first = self._own[self._turn - 1] + 1
        following = self._own[self._turn] if self._turn < len(self._own) else len(self.saved.messages)
        self._compare(answers, self.saved.messages[first:following], f"the answer to turn {self._turn}")
        if self._turn == self.saved.turns and self.saved.outcome is Outcome.CONTEXT_OVERFLOW:
            raise ContextOverflowError("the saved chain did not fit")

    def _compare(self, found: Sequence[Message], saved: Sequence[Message], what: str) -> None:
        for mine, theirs in zip(found, saved, strict=False):
            if mine != theirs:
                raise DivergedError(f"{what} is {_shown(mine)!r}, and was {_shown(theirs)!r}")
        if len(found) != len(saved):
            raise DivergedError(f"{what} has {len(found)} messages, and had {len(saved)}")


def own_messages(chain: Trajectory) -> list[int]:
    """Return the places of the messages that the policy wrote; a task may begin with earlier ones of the assistant."""
    said = [index for index, message in enumerate(chain.messages) if message["role"] == "assistant"]
    return said[len(said) - chain.turns :] if chain.turns else []


def was_cut(sampled: Sequence[int], renderer: Renderer) -> bool:
    """Return whether a turn ended at a limit, without a stop token or a stop string."""
    return bool(sampled) and sampled[-1] not in renderer.stop_token_ids and renderer.stopped(list(sampled)) is None


def _shown(message: Message) -> str:
    return str(message.get("content"))[:160]


@dataclass(frozen=True)
class Replayed:
    """A chain that was played again. `diverged`: what happened otherwise than in the saved one; None if nothing did."""

    chain: Trajectory
    diverged: str | None


class ReplayRunner(Runner):
    """A runner whose chains take the turns of saved ones."""

    def __init__(self, recipe: Recipe, renderer: Renderer, toolset: Toolset, rewards: Rewards) -> None:
        super().__init__(recipe, renderer.dialogue, renderer.images, renderer.cut, toolset, rewards)
        self.renderer = renderer
        self._saved: Trajectory | None = None

    async def replay(self, saved: Trajectory, task: Task) -> Replayed:
        """Play a saved chain of `task` again. Its tools must depend on their calls and on the task alone."""
        runner = copy(self)
        runner._saved = saved
        chain, diverged = begin(saved.id), None
        chain.rows = [*saved.rows]  # for rewards that count tokens
        try:
            await runner.play(chain, task, Sampling("", 0.0, seed=saved.id), frozenset({saved.outcome}))
        except DivergedError as error:
            diverged = str(error)
        if diverged is None and chain.messages != saved.messages:
            diverged = "its last messages differ"
        if diverged is None and chain.anchors != saved.anchors:
            diverged = f"the states of its environment differ: {_first_difference(chain, saved)}"
        if diverged is None and chain.outcome is not saved.outcome:
            diverged = f"it ended as {chain.outcome}, and before as {saved.outcome}: {chain.error or ''}"
        return Replayed(chain, diverged)

    def player(self, episode: Episode) -> ToolLoop:
        assert self._saved is not None
        return ToolLoop(episode, SavedTurns(episode, self.renderer, self._saved))


def _first_difference(chain: Trajectory, saved: Trajectory) -> str:
    for turn, (mine, theirs) in enumerate(zip(chain.anchors, saved.anchors, strict=False), 1):
        if mine != theirs:
            return f"{mine} before turn {turn}, and was {theirs}"
    return f"{len(chain.anchors)} anchors, and {len(saved.anchors)} before"

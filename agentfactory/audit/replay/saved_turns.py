"""`SavedTurns`: the turns of a saved chain, for a tool loop that plays it again."""

from collections.abc import Sequence

from agentfactory.base.messages import Message
from agentfactory.rollout.chains.context import Context
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.tool_loop import TakenTurn
from agentfactory.rollout.inference.http_transport import ContextOverflowError
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.trajectory import Outcome, Trajectory


class DivergedError(Exception):
    """The chain that is played again does something else than the saved one; the message says what."""


class SavedTurns:
    """The turns of a saved chain, parsed again from their tokens; see Turns.

    Messages that come between them must be the saved ones: the first that differs raises DivergedError, as does a turn
    after the last.
    """

    def __init__(self, episode: Episode, renderer: Renderer, saved: Trajectory) -> None:
        self.episode, self.renderer, self.saved = episode, renderer, saved
        self.context = Context([])
        self._turn = 0
        self._own = own_messages(saved)

    def begin(self, opening: list[Message]) -> None:
        """See Turns."""
        self.context = Context(opening)
        self._compare(opening, self.saved.messages[: self._own[0]] if self._own else self.saved.messages, "the opening")

    async def take(self, anchor: str | None) -> TakenTurn:
        """See Turns."""
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
        """See Turns."""
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

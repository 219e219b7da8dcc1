"""The beginning of a saved chain, played again token by token, and changes to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentfactory.audit.replay.replay_runner import DivergedError, was_cut
from agentfactory.base.messages import Message, ToolSpec
from agentfactory.rollout.chains.agent_hooks import AgentHooks, Turn
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class Change:
    """The difference of a chain that is played again from the saved one. `actions` replace the assistant's messages at
    some turns, `result` the text of the results of the last turn that is played again, and `system` the system prompt:
    the messages are then rendered again, and their tokens differ from those that were sampled."""

    actions: dict[int, Message] | None = None
    result: str | None = None
    system: str | None = None

    @property
    def is_exact(self) -> bool:
        """True if the tokens before the changed turn are those of the saved chain."""
        return self.system is None


class PrefixHooks(AgentHooks):
    """Hooks that take the first `turns` turns of a saved chain, or the actions of a change, and sample the rest. If the
    prompt of a turn is not the saved one, token by token, the chain ends with an error, and `diverged` says why."""

    def __init__(self, saved: Trajectory, turns: int, change: Change) -> None:
        self.saved, self.turns, self.change = saved, turns, change
        self.diverged: str | None = None
        self._spans = saved.turn_spans()

    async def generate(self, turn: Turn) -> Completion:
        actions = self.change.actions or {}
        if turn.number in actions:
            ids = tokens_of(actions[turn.number], turn.messages, turn.specs, turn.renderer)
            # inserted tokens, which were not sampled
            completion = Completion(ids, [0.0] * len(ids), [], False, [0] * len(ids))
        elif turn.number < self.turns:
            completion = self._again(turn)
        else:
            if turn.number == self.turns:
                self._compare(turn)
            return await turn.sample()
        turn.made.append(completion)
        return completion

    def _again(self, turn: Turn) -> Completion:
        self._compare(turn)
        row_number, start, end = self._spans[turn.number]
        row, renderer = self.saved.rows[row_number], turn.renderer
        begin = start - (len(renderer.encode(turn.prefix)) if turn.prefix else 0)
        ids = [int(token) for token in row.token_ids[begin:end]]
        logprobs = [float(value) for value in row.logprobs[begin:end]]
        mask = [int(value) for value in row.mask[begin:end]]
        spans = [
            replace(span, start=max(span.start, begin) - begin, end=min(span.end, end) - begin)
            for span in row.versions
            if span.start < end and span.end > begin
        ]
        return Completion(ids, logprobs, spans, was_cut(ids, renderer), mask)

    def _compare(self, turn: Turn) -> None:
        changed = any(number < turn.number for number in self.change.actions or {})
        after_result = self.change.result is not None and turn.number >= self.turns
        if not self.change.is_exact or changed or after_result or turn.number >= len(self._spans):
            return
        row_number, start, _ = self._spans[turn.number]
        begin = start - (len(turn.renderer.encode(turn.prefix)) if turn.prefix else 0)
        mine, saved = np.asarray(turn.token_ids), np.asarray(self.saved.rows[row_number].token_ids[:begin])
        size = min(len(mine), len(saved))
        differing = np.flatnonzero(mine[:size] != saved[:size])
        if differing.size or len(mine) != len(saved):
            at = int(differing[0]) if differing.size else size
            there, was = (turn.renderer.decode([int(token) for token in ids[at : at + 12]]) for ids in (mine, saved))
            self.diverged = f"before turn {turn.number + 1}, token {at}: {there!r}, and was {was!r}"
            raise DivergedError(self.diverged)


def tokens_of(message: Message, before: Sequence[Message], specs: Sequence[ToolSpec], renderer: Any) -> list[int]:
    """Return the tokens of an assistant's message after the messages `before`, with its end of turn."""
    assert isinstance(renderer, Renderer)
    plain = [{**one, "weight": 0.0} if one["role"] == "assistant" else one for one in before]
    row = renderer.conversation_row([*plain, message], list(specs))
    trained = np.flatnonzero(np.asarray(row.mask, dtype=bool))
    return [int(row.token_ids[place]) for place in trained]


def anchors_differ(chain: Trajectory, saved: Trajectory, turns: int) -> str | None:
    """Return where the states before and after the first `turns` turns differ; None if they are equal or unknown."""
    pairs = zip(chain.anchors[: turns + 1], saved.anchors[: turns + 1], strict=False)
    for turn, (mine, theirs) in enumerate(pairs, 1):
        if mine != theirs:
            return f"before turn {turn} the environment is in another state ({mine}, and was {theirs})"
    return None

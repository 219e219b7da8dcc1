"""The conversation in the model's prompt: complete, or shortened by `rollout.context`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentfactory.base.messages import Message
from agentfactory.rollout.chains.opening_prompt import add_text
from agentfactory.rollout.config import RolloutConfig
from agentfactory.rollout.images.parts import image_urls


@dataclass
class Context:
    """The conversation in a chain's row: the opening, a summary of what was left out, and turns with their answers."""

    opening: list[Message]
    turns: list[list[Message]] = field(default_factory=list)
    summary: str | None = None

    @property
    def messages(self) -> list[Message]:
        opening = self.opening
        if self.summary is not None:
            # not a separate message: many templates require the roles to alternate
            opening = add_text(opening, f"Summary of the work so far:\n{self.summary}")
        return [*opening, *(message for turn in self.turns for message in turn)]

    def say(self, message: Message) -> None:
        self.turns.append([message])

    def hear(self, answers: Sequence[Message]) -> None:
        self.turns[-1] += answers

    def with_images(self, most: int | None) -> "Context":
        """Return the conversation without its oldest turns, so that at most `most` images are left if possible."""
        if most is None:
            return self
        counts = [len(image_urls(turn)) for turn in self.turns]
        total = len(image_urls(self.opening)) + sum(counts)
        left_out = 0
        while total > most and any(counts[left_out:-1]):
            total -= counts[left_out]
            left_out += 1
        return Context(self.opening, self.turns[left_out:], self.summary)


def is_long(length: int, config: RolloutConfig) -> bool:
    """Return whether `rollout.context` must shorten a row of `length` tokens."""
    return config.context.policy != "keep" and length >= config.max_total_tokens * 3 // 4

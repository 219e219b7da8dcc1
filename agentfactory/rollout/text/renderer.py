"""The interface of renderers: messages to token ids and ids back to messages, so that sampled ids are never tokenised
again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentfactory.rollout.images.image_intake import Images
from agentfactory.rollout.text.dialogue import Dialogue
from agentfactory.rollout.token_row import Row
from agentfactory.tools.messages import Message, ToolCall, ToolSpec


@dataclass(frozen=True)
class Parsed:
    """The content of a sampled turn. `error`, written for the model, is what is wrong with it; if set, no call of the
    turn is executed and `message` contains the text as written. `answer` is the final answer if the format marks one.
    `roles` has a letter for each sampled token (token_roles.turn_roles); empty: unknown."""

    message: Message
    calls: list[ToolCall] = field(default_factory=list)
    error: str | None = None
    answer: str | None = None
    roles: str = ""


class Renderer(Protocol):
    """Turns conversations into token ids, and sampled ids into messages.

    The caller keeps the pieces: `open`, then sampled ids and `extend` in turn. The server gets their concatenation.
    `dialogue` writes the messages in the tool-call format: it needs no token ids.

    A turn ends with one of `stop_token_ids`, or with the token that completes one of `stops` outside its reasoning.
    `images` is how the model gets images. Ids have one token for each image: the caller expands
    them.
    """

    dialogue: Dialogue
    stop_token_ids: list[int]
    stops: tuple[str, ...]
    info: dict[str, Any]
    images: Images

    @property
    def chat_template(self) -> str:
        """The Jinja source in use, which checkpoints and exports include."""

    def open(self, messages: list[Message], specs: list[ToolSpec]) -> list[int]:
        """Return the ids of a conversation, ending with the generation prompt."""

    def extend(
        self, ids: list[int], messages: list[Message], new: list[Message], specs: list[ToolSpec]
    ) -> list[int] | None:
        """Return the ids to append to `ids`, which end with a sampled turn, for the messages `new` and the next turn.

        `messages` is the whole conversation, `new` included. None means that the template rewrites history here; begin
        a new row with `open(messages, specs)`.
        """

    def parse(
        self, sampled_ids: list[int], first_call: int = 0, prefix: str = "", specs: Sequence[ToolSpec] = ()
    ) -> Parsed:
        """Parse a sampled turn into a message; its calls are numbered from `first_call` (the chain's calls so far).
        `prefix` is the text that the turn was made to begin with, and is part of the message. Text formats take the
        types of arguments from `specs`."""

    def parse_text(self, sampled_ids: list[int]) -> Parsed:
        """Read a sampled turn of a conversation without tools: a message, whatever it looks like."""

    def continuation(self, text: str) -> list[int]:
        """Return the ids of text that is not the model's, behind a turn without a token that ends it."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without a token that ends a turn at their end."""

    def stopped(self, ids: list[int]) -> int | None:
        """Return the number of a turn's ids up to the one that completes a stop string; None if none does."""

    def encode(self, prefix: str) -> list[int]:
        """Return the ids of the text that each turn is made to begin with (`rollout.assistant_prefix`)."""

    def cut(self, text: str, max_tokens: int) -> str | None:
        """Cut the middle of `text`, leaving at most `max_tokens` tokens and a marker; None if it fits."""

    def conversation_row(self, messages: list[Message], specs: list[ToolSpec]) -> Row:
        """Return a whole conversation as one row for supervised training; its images are expanded."""

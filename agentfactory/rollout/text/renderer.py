"""The interface of renderers, which convert messages to token ids and back, and never tokenise sampled text again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentfactory.base.messages import Message, ToolCall, ToolSpec
from agentfactory.rollout.images.image_intake import Images
from agentfactory.rollout.text.dialogue import Dialogue
from agentfactory.rollout.token_row import Row


@dataclass(frozen=True)
class Parsed:
    """The content of a sampled turn. `error`, written for the model, describes a malformed turn; if set, no call of the
    turn is executed and `message` contains the sampled text. `answer` is the final answer if the format marks one.
    `roles` has a letter for each sampled token (token_roles.turn_roles); empty: unknown."""

    message: Message
    calls: list[ToolCall] = field(default_factory=list)
    error: str | None = None
    answer: str | None = None
    roles: str = ""


class Renderer(Protocol):
    """A converter of conversations to token ids, and of sampled ids to messages.

    The caller concatenates the pieces for the server: `open`, then sampled ids and `extend` alternately. `dialogue`
    writes messages in the tool-call format, without token ids.

    A turn ends with one of `stop_token_ids`, or with the token that completes one of `stops` outside its reasoning.
    `images` prepares images for the model. Ids have one token per image, which the caller expands.
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

        `messages` is the whole conversation, `new` included. None means that the template rewrites history here: the
        caller must begin a new row with `open(messages, specs)`.
        """

    def parse(
        self, sampled_ids: list[int], first_call: int = 0, prefix: str = "", specs: Sequence[ToolSpec] = ()
    ) -> Parsed:
        """Parse a sampled turn into a message; its calls are numbered from `first_call` (the chain's calls so far).
        `prefix` is the forced beginning of the turn, and part of the message. Text formats get the types of arguments
        from `specs`."""

    def parse_text(self, sampled_ids: list[int]) -> Parsed:
        """Parse a sampled turn without tools into a message, even if its text looks like a call."""

    def continuation(self, text: str) -> list[int]:
        """Return the ids of text from others that follows a turn without an end-of-turn token."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without a final end-of-turn token."""

    def stopped(self, ids: list[int]) -> int | None:
        """Return the number of a turn's ids up to the one that completes a stop string; None without a stop string."""

    def encode(self, prefix: str) -> list[int]:
        """Return the ids of the forced beginning of each turn (`rollout.assistant_prefix`)."""

    def cut(self, text: str, max_tokens: int) -> str | None:
        """Cut the middle of `text`, leaving at most `max_tokens` tokens and a marker; None if it fits."""

    def conversation_row(self, messages: list[Message], specs: list[ToolSpec]) -> Row:
        """Return a whole conversation as one row for supervised training; its images are expanded."""

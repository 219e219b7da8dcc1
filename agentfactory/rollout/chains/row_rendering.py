"""Rendering of messages into token rows, by the chat template, with image tokens expanded."""

from collections.abc import Sequence
from typing import NamedTuple

from agentfactory.base.messages import Message, ToolSpec
from agentfactory.rollout.inference.inference_client import Completion, EncodedIds
from agentfactory.rollout.text.renderer import Parsed, Renderer
from agentfactory.rollout.token_row import ImageSpan, Row


class Piece(NamedTuple):
    """Token ids to append to a row as context, and the positions of images in them."""

    ids: list[int]
    images: list[ImageSpan]


class RowRenderer:
    """A renderer of messages as pieces of rows."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._images = renderer.images

    def open(self, messages: list[Message], specs: list[ToolSpec]) -> Piece:
        """Render a conversation, including the generation prompt."""
        return Piece(*self._images.expand(self._renderer.open(messages, specs), messages))

    def extend(self, row: Row, messages: list[Message], new: list[Message], specs: list[ToolSpec]) -> Piece | None:
        """Return the piece that extends `row` by `new`, the last of the conversation's `messages`, including the
        generation prompt; None if the template rewrites earlier messages, so that the next turn needs a new row."""
        ids = self._renderer.extend(self._images.collapse(row), messages, new, specs)
        return None if ids is None else Piece(*self._images.expand(ids, new))


def append_turn(row: Row, completion: Completion) -> None:
    """Append a sampled turn to a row."""
    row.append_sampled(completion.token_ids, completion.logprobs, completion.versions, completion.mask)


def note_roles(row: Row, completion: Completion, parsed: Parsed) -> None:
    """Record the roles of the tokens of the row's last turn, unless a user's agent parsed other tokens."""
    if len(parsed.roles) == len(completion.token_ids):
        row.note_roles(parsed.roles)


class GrowingRows:
    """The rows of a chain with a linear history: only the last row grows."""

    def __init__(self, rows: list[Row], renderer: Renderer, specs: list[ToolSpec]) -> None:
        self._rows = rows
        self._renderer = RowRenderer(renderer)
        self._specs = specs
        self._encoded = EncodedIds()

    @property
    def current(self) -> Row:
        """The row that grows."""
        return self._rows[-1]

    def encoded(self, ids: Sequence[int]) -> EncodedIds | None:
        """Return the encoding cached by earlier requests if `ids` is the current row's list, otherwise None."""
        return self._encoded if ids is self.current.token_ids else None

    def open(self, messages: list[Message]) -> Piece:
        """Render a conversation, including the generation prompt."""
        return self._renderer.open(messages, self._specs)

    def begin(self, piece: Piece) -> None:
        """Start a row with `piece`."""
        self._rows.append(Row())
        self._encoded = EncodedIds()
        self.current.append_context(*piece)

    def extend(self, messages: list[Message], new: list[Message]) -> tuple[Piece | None, int]:
        """Return the piece that extends the current row by the last messages `new` (see RowRenderer), and the number of
        tokens that then precede the next turn."""
        piece = self._renderer.extend(self.current, messages, new, self._specs)
        if piece is None:
            return None, len(self.open(messages).ids)
        return piece, len(self.current.token_ids) + len(piece.ids)

    def follow(self, piece: Piece | None, messages: list[Message]) -> None:
        """Append the piece that `extend` returned for the conversation `messages`; if it is None, start a row with the
        whole conversation."""
        if piece is None:
            self.begin(self.open(messages))
        else:
            self.current.append_context(*piece)

"""The token rows of a chain: messages as the chat template renders them, with as many tokens for an image as it
takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentfactory.rollout.inference.inference_client import Completion, EncodedIds
from agentfactory.rollout.text.renderer import Parsed, Renderer
from agentfactory.rollout.token_row import ImageSpan, Row
from agentfactory.tools.messages import Message, ToolSpec


@dataclass(frozen=True)
class Piece:
    """Ids to be added to a row as context, and where images are in them."""

    ids: list[int]
    images: list[ImageSpan]

    def add_to(self, row: Row) -> None:
        """Append the ids to a row."""
        row.append_context(self.ids, self.images)


class RowRenderer:
    """Renders messages as pieces of rows."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._images = renderer.images

    def open(self, messages: list[Message], specs: list[ToolSpec]) -> Piece:
        """Return a conversation, up to the generation prompt."""
        return Piece(*self._images.expand(self._renderer.open(messages, specs), messages))

    def extend(self, row: Row, messages: list[Message], new: list[Message], specs: list[ToolSpec]) -> Piece | None:
        """Return what extends `row` by the messages `new`, up to the generation prompt; `messages` is the whole
        conversation. None if the template rewrites earlier messages: what follows is then sampled in a new row."""
        ids = self._renderer.extend(self._images.collapse(row), messages, new, specs)
        return None if ids is None else Piece(*self._images.expand(ids, new))


def append_turn(row: Row, completion: Completion) -> None:
    """Append a sampled turn to a row."""
    row.append_sampled(completion.token_ids, completion.logprobs, completion.versions, completion.mask)


def note_roles(row: Row, completion: Completion, parsed: Parsed) -> None:
    """Note what the tokens of the row's last turn are for, unless a user's agent has parsed something else."""
    if len(parsed.roles) == len(completion.token_ids):
        row.note_roles(parsed.roles)


class GrowingRows:
    """The rows of a chain with one history: the last one grows until a new one begins."""

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
        """Return what earlier requests have encoded, if `ids` are those of the current row."""
        return self._encoded if ids is self.current.token_ids else None

    def open(self, messages: list[Message]) -> Piece:
        """Return a conversation, up to the generation prompt."""
        return self._renderer.open(messages, self._specs)

    def begin(self, piece: Piece) -> None:
        """Begin a row."""
        self._rows.append(Row())
        self._encoded = EncodedIds()
        piece.add_to(self.current)

    def extend(self, messages: list[Message], new: list[Message]) -> tuple[Piece | None, int]:
        """Return what extends the current row by the last messages `new` (see RowRenderer), and the length of the row
        that the next turn is sampled after."""
        piece = self._renderer.extend(self.current, messages, new, self._specs)
        if piece is None:
            return None, len(self.open(messages).ids)
        return piece, len(self.current.token_ids) + len(piece.ids)

    def follow(self, piece: Piece | None, messages: list[Message]) -> None:
        """Append what `extend` returned for the conversation `messages`; for None, begin a row with all of it."""
        if piece is None:
            self.begin(self.open(messages))
        else:
            piece.add_to(self.current)

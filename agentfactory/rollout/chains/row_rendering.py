"""Rendering of messages into token rows, by the chat template, with image tokens expanded."""

from typing import NamedTuple

from agentfactory.base.messages import Message, ToolSpec
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.text.renderer import Parsed, Renderer
from agentfactory.rollout.token_row import ImageSpan, Row


class Piece(NamedTuple):
    """Token ids to append to a row as context, and the positions of images in them."""

    ids: list[int]
    images: list[ImageSpan]


class RowRenderer:
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
    row.append_sampled(completion.token_ids, completion.logprobs, completion.versions, completion.mask)


def note_roles(row: Row, completion: Completion, parsed: Parsed) -> None:
    """Record the roles of the tokens of the row's last turn, unless a user's agent parsed other tokens."""
    if len(parsed.roles) == len(completion.token_ids):
        row.note_roles(parsed.roles)

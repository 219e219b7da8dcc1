"""`Document`: what an address gave; `Text`: what a model reads of it."""

from dataclasses import dataclass


class PageError(Exception):
    """A page that cannot be read. The message is for the model."""


@dataclass(frozen=True)
class Document:
    """What an address gave: `url` is the one after redirects, `type` the media type, `charset` the one that the server
    named."""

    url: str
    type: str
    charset: str | None
    content: bytes


@dataclass(frozen=True)
class Text:
    """A document as plain text or markdown. Its links read `[label][3]`; the address of number 3 is `links[2]`."""

    title: str
    text: str
    links: tuple[str, ...] = ()

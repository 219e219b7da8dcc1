"""`Document`, a fetched response, and `Text`, its text for the model."""

from dataclasses import dataclass


class PageError(Exception):
    """A page cannot be read. The message is shown to the model."""


@dataclass(frozen=True)
class Document:
    """A fetched document: `url` is the address after redirects, `type` the media type, `charset` the server's."""

    url: str
    type: str
    charset: str | None
    content: bytes


@dataclass(frozen=True)
class Text:
    """A document as plain text or markdown. Link 3 appears as `[label][3]`; its address is `links[2]`."""

    title: str
    text: str
    links: tuple[str, ...] = ()

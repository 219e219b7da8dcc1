"""Images in the messages of a chain."""

import base64
import binascii
from typing import Any

from agentfactory.rollout.images.store import ImageStore, stored_digest
from agentfactory.viewer.runs.run_data import Run

SHOWN_KINDS = ("image/png", "image/jpeg", "image/webp", "image/gif")
"""Kinds of images that are shown. Other kinds, and images on the web, are named and never loaded."""


def image_url(part: Any) -> str | None:
    """Return the address in a part of a message if it is an image that may be shown, else None."""
    shown = part.get("image_url") if isinstance(part, dict) else None
    url = shown.get("url") if isinstance(shown, dict) else None
    if not isinstance(url, str):
        return None
    return url if _data(url) or stored_digest(url) else None


def read_image(run: Run, url: str) -> tuple[str, bytes]:
    """Return the kind and bytes of an image at an address from `image_url`. Raises ValueError if it is damaged or
    missing."""
    if digest := stored_digest(url):
        return "image/png", ImageStore(run.folder.images, run.folder.within).png(digest)
    found = _data(url)
    if found is None:
        raise ValueError("no image that may be shown")
    kind, data = found
    try:
        return kind, base64.b64decode(data)
    except binascii.Error as error:
        raise ValueError("the image is not base64") from error


def data_url(run: Run, url: str) -> str:
    """Return the same image as a `data:` address; `url` itself if it cannot be read."""
    try:
        kind, content = read_image(run, url)
    except ValueError:
        return url
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _data(url: str) -> tuple[str, str] | None:
    """Return the kind and base64 data of a data URL with an image that may be shown, else None."""
    for kind in SHOWN_KINDS:
        if url.startswith(start := f"data:{kind};base64,"):
            return kind, url[len(start) :]
    return None

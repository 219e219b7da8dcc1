"""Cuts results that are longer than `limits.result_tokens`."""

from collections.abc import Callable

from agentfactory.tools.messages import Content

Cut = Callable[[str, int], str | None]
"""(text, max tokens) -> the text cut in the middle, with a visible marker; None if it fits."""


def truncated(content: Content, most: int, cut: Cut | None) -> Content | None:
    """Cut the text in `content` to `most` tokens; None if it fits. Several texts become one; images stay."""
    assert cut is not None
    if isinstance(content, str):
        return cut(content, most)
    texts = [part["text"] for part in content if part["type"] == "text"]
    shorter = cut("\n".join(texts), most)
    if shorter is None:
        return None
    first = next(index for index, part in enumerate(content) if part["type"] == "text")
    kept = [part for part in content if part["type"] != "text"]
    kept.insert(first, {"type": "text", "text": shorter})
    return kept

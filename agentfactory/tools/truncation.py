"""Results that are longer than `limits.result_tokens`."""

from collections.abc import Callable

from agentfactory.tools.messages import Content

Cut = Callable[[str, int], str | None]
"""(text, most tokens) -> the text cut in its middle, with a visible marker; None where it fits."""


def truncated(content: Content, most: int, cut: Cut | None) -> Content | None:
    """`content` with its text cut to `most` tokens, None where it fits. Texts beside images become one; images stay."""
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

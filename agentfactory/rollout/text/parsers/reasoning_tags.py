"""The tags that chat templates write around reasoning."""

THINK = ("<think>", "</think>")
REASONING_TAGS = (
    THINK,
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""Opening and closing tags."""


def reasoning_tags(text: str) -> tuple[str, str]:
    """Return the tags around the reasoning `wordreason` in a rendered text, or the tags in a template's source; by
    default `<think>`."""
    before, found, after = text.partition("wordreason")
    if found:
        for tags in REASONING_TAGS:
            if before.rstrip().endswith(tags[0].rstrip()) and after.lstrip().startswith(tags[1]):
                return tags
    return next((tags for tags in REASONING_TAGS if tags[0].strip() in text), THINK)


def split_reasoning(text: str, opened: bool, tags: tuple[str, str] = THINK) -> tuple[str, str, str]:
    """Split text into the reasoning, the reasoning as written with its tags, and the text after it, which is empty
    if the reasoning was cut.

    `opened`: the text begins inside the reasoning.
    """
    opening, closing = tags
    inside = text.lstrip()
    if inside.startswith(opening):
        inside = inside.removeprefix(opening)
    elif not opened:
        return "", "", text
    reasoning, _, rest = inside.partition(closing)
    rest = rest.lstrip()
    return reasoning.strip(), text[: len(text) - len(rest)], rest

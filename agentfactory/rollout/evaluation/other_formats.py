"""The tool-call formats that read what a model writes, when the recipe's format does not."""

from collections import Counter
from collections.abc import Sequence

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers import PARSERS, Parser, load_parser


def format_name(parser: Parser) -> str | None:
    """Return the name in PARSERS of a parser; None for a custom one, or for that of a chat endpoint."""
    place = f"{type(parser).__module__}:{type(parser).__qualname__}"
    return next((name for name, known in PARSERS.items() if known == place), None)


def formats_that_read(texts: Sequence[str], specs: Sequence[ToolSpec]) -> Counter[str]:
    """Return for each format in PARSERS the number of `texts` that it reads as calls of these tools; formats that read
    none are left out. Formats in plain text, which need no chat template, come before others that read as many."""
    found: Counter[str] = Counter()
    for name, parser in sorted(((name, load_parser(name)) for name in PARSERS), key=lambda pair: pair[1].native):
        if not _can_call(parser, specs):
            continue
        read = sum(reads_call(parser, text, specs) for text in texts)
        if read:
            found[name] = read
    return Counter(dict(found.most_common()))


def _can_call(parser: Parser, specs: Sequence[ToolSpec]) -> bool:
    try:
        parser.instructions(specs)
    except ValueError:
        return False
    return True


def reads_call(parser: Parser, text: str, specs: Sequence[ToolSpec]) -> bool:
    """Return whether a parser reads at least one call in `text`, and only calls of offered tools: other JSON may look
    like a call."""
    found = parser.parse(text, specs)
    names = {name for name, _ in found.calls}
    return found.error is None and bool(names) and names <= {spec.name for spec in specs}

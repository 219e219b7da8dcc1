"""The nouns of a title, found by spaCy if it and an English model are installed, else by a small tagger of our own.

The published reward compares the nouns and proper nouns that spaCy finds in two titles. Product titles are mostly
nouns, so the small tagger counts each word as a noun unless it is a number, a closed-class word, or one of the most
frequent adjectives and verbs in product titles.
"""

import importlib.util
import re
from collections.abc import Callable
from functools import cache, lru_cache

_TITLES = 100_000
"""Titles whose nouns are cached, about 200 bytes each."""


class NounTagger:
    """A noun tagger for titles; `name` identifies the method and its version."""

    def __init__(self, name: str, find: Callable[[str], list[str]]) -> None:
        self.name = name
        self._find = lru_cache(_TITLES)(lambda title: tuple(find(title)))

    def __call__(self, title: str) -> tuple[str, ...]:
        """Return the nouns and proper nouns in lower case, with repetitions."""
        return self._find(title)


@cache
def load_tagger() -> NounTagger:
    """Return spaCy's tagger if spaCy and one of its English models are installed, else the small one."""
    for model in ("en_core_web_sm", "en_core_web_lg", "en_core_web_md"):
        if importlib.util.find_spec("spacy") is not None and importlib.util.find_spec(model) is not None:
            return _spacy_tagger(model)
    return NounTagger("agentfactory 1", _words_but_others)


def _spacy_tagger(model: str) -> NounTagger:
    import spacy

    parse = spacy.load(model)

    def find(title: str) -> list[str]:
        return [token.text.lower() for token in parse(title) if token.pos_ in ("NOUN", "PROPN")]

    return NounTagger(f"spacy {spacy.__version__}, {model} {parse.meta['version']}", find)


def _words_but_others(title: str) -> list[str]:
    words = re.findall(r"[^\W_]+(?:'[^\W_]+)*", title.lower())
    return [word for word in words if word[0].isalpha() and len(word) > 1 and word not in _OTHERS]


_OTHER_WORDS = """
an the this that these those any all both each every some no not such same other another own
and or nor but so yet if than as while when where which who whose what how
of in on at by for with without from to into onto over under up down off out about above below between through during
before after per via plus against around across
it its it's he him his she her they them their we us our you your my me one ones
is are was were be been being am do does did has have had can could will would may might must should
very more most less least too also only just even ever still up
two three four five six seven eight nine ten first second third
new large small big mini long short high low wide narrow slim thick thin heavy light soft hard hot cold warm cool dry
wet fresh clean natural organic portable wireless waterproof adjustable reusable disposable foldable removable
rechargeable compatible suitable perfect great good best better easy fast quick safe healthy free full double single
dual multi modern classic casual elegant vintage cute comfortable breathable lightweight durable stainless electric
automatic professional personal ultra super extra premium original universal
black white red blue green yellow brown grey gray pink purple orange beige
fits fit include includes included including use used using made make makes set contains
"""
_OTHERS = frozenset(_OTHER_WORDS.split())
"""Closed-class words, and the most frequent adjectives and verbs in product titles."""

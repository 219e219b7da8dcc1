"""Rankings of an index: lexical (BM25), dense, or hybrid (reciprocal rank fusion of both)."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.extras import check_extra
from agentfactory.worlds.search.passage import Passage

_CONSTANT = 60
"""The constant k of Cormack et al., 2009."""
_DEPTH = 100
"""Passages that each ranking contributes to the fusion."""


class Ranking(StrEnum):
    """The method that ranks passages."""

    BM25 = "bm25"
    DENSE = "dense"
    HYBRID = "hybrid"


class Index(Protocol):
    """An index on disk. Its methods are thread-safe."""

    def search(self, query: str, count: int) -> list[Passage]:
        """Return at most `count` passages, best first. Any text is a valid query."""
        ...


def open_index(folder: Path, ranking: str | None = None) -> Index:
    """Open the index in `folder`. `ranking` is one of Ranking; None: hybrid if the index has a dense model, else bm25.
    Raises SettingError if there is no index, or no vectors for this ranking, or the extra `search` is missing."""
    if ranking not in (None, *Ranking):
        raise SettingError("ranking", f"got {ranking!r}", f"use one of {', '.join(Ranking)}")
    check_extra("search")
    from agentfactory.worlds.search.local_index import LocalIndex

    words = LocalIndex(folder)
    if ranking is None:
        ranking = Ranking.HYBRID if words.has_vectors else Ranking.BM25
    if ranking == Ranking.BM25:
        return words
    if not words.has_vectors:
        fix = "build it with --dense MODEL, or use bm25"
        raise SettingError("ranking", f"got {ranking}, and {folder} has no vectors", fix)
    # loads torch
    from agentfactory.worlds.search.dense import DenseIndex

    meaning = DenseIndex(words)
    return meaning if ranking == Ranking.DENSE else HybridIndex([words, meaning])


class HybridIndex:
    """A fusion of several rankings of the same passages."""

    def __init__(self, indexes: Sequence[Index]) -> None:
        self._indexes = indexes

    def search(self, query: str, count: int) -> list[Passage]:
        """Scores are fusion scores."""
        depth = max(count, _DEPTH)
        return reciprocal_rank([index.search(query, depth) for index in self._indexes])[: max(0, count)]


def reciprocal_rank(rankings: Sequence[Sequence[Passage]]) -> list[Passage]:
    """Fuse rankings by the sums of 1 / (60 + rank) (Cormack et al., 2009, doi:10.1145/1571941.1572114)."""
    scores: dict[Passage, float] = {}
    for ranking in rankings:
        for rank, passage in enumerate(ranking, 1):
            # ids may be repeated in a corpus, so compare whole passages
            same = replace(passage, score=None)
            scores[same] = scores.get(same, 0.0) + 1 / (_CONSTANT + rank)
    best = sorted(scores, key=scores.__getitem__, reverse=True)
    return [replace(passage, score=scores[passage]) for passage in best]

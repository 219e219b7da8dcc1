"""Local search: building an index of a million short passages, querying it, and its quality compared with bm25s.

The passages are made up from a seed: about 40 words each, half of them English function words, half inflected forms of
made-up stems whose frequencies follow Zipf's law. They are read from a file, as `agentfactory index build` does. A
query consists of function words and four words of one passage, half of them inflected differently. A passage is found
if it is among the three best (recall@3). bm25s (k1 = 1.2, b = .75, its English stop words, PyStemmer's English stemmer)
indexes the same passages in memory, and answers the same queries.

- build: `build_index`, with the reading of the file.
- queries: 64 chains search concurrently, each again as soon as it has its result, through the source that all chains of
  a process share, without its cache of earlier searches. A single chain's queries are printed, too.
- hostile queries: operators, brackets, quotes, other scripts, control characters, lone surrogates, 10,000 characters;
  an exception ends the benchmark.

The last line is JSON: `passages_per_second`, `p50_ms` and `p95_ms` of a query from 64 chains, `bytes_per_passage` on
disk, `recall_vs_bm25s` (recall@3 over that of bm25s), `recall` and `recall_bm25s`, the number of answered
`hostile_queries`.

    python benchmarks/search.py [--quick]
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import bm25s
import numpy as np
import Stemmer

from agentfactory.worlds.search.corpus import Corpus
from agentfactory.worlds.search.local_index import LocalIndex, build_index
from agentfactory.worlds.search.sources import IndexSource

CHAINS, COUNT = 64, 3
STEMS, WORDS = 60_000, 40
ENDINGS = ("", "s", "ed", "ing")
FUNCTION_WORDS = (
    *("the", "of", "and", "to", "a", "in", "is", "was", "for", "that", "it", "on", "as", "with", "by", "at", "from"),
    *("his", "her", "an", "were", "are", "which", "this", "also", "has", "had", "not", "or", "be", "but", "its"),
)
HOSTILE = (
    *('"', "(", ")", "[", "]", "{", "}", ":", "^", "~", "*", "?", "\\", "/", "+", "-", "&&", "||", "!", "\x00", "\n"),
    *("AND", "OR", "NOT", "TO", "IN", "title:", "id:", "number:", "terms:", "a^", "[a TO b]", "\ud800", "\u200b", "🤖"),
    *(
        "東京",
        "การ",
        "हिन्दी",
        "العربية",
        "Ελλάδα",
        "e\u0301",
        "ﬁ",
        "İ",
        "ß",
        "1e999",
        "-0",
        "' OR 1=1 --",
        "<|im_end|>",
    ),
)


@dataclass
class Made:
    """Passages in a file, and queries with the number of the passage that each should find."""

    file: Path
    queries: list[str]
    wanted: list[int]


def make(folder: Path, passages: int, queries: int) -> Made:
    """Generate passages and queries from a seed."""
    rng = np.random.default_rng(1)  # the cut for common words was chosen with another seed
    syllables = [f"{a}{b}" for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "al", "or", "em")]
    stems = np.array(["".join(rng.choice(syllables, size=2 + number % 3)) + "t" for number in range(STEMS)])
    weights = 1 / np.arange(3, STEMS + 3)
    weights /= weights.sum()
    made = Made(folder / "passages.jsonl", [], [])
    asked = set(rng.choice(passages, size=queries, replace=False).tolist())
    number = 0
    with made.file.open("w") as file:
        while number < passages:
            some = min(10_000, passages - number)
            chosen = rng.choice(STEMS, size=(some, WORDS // 2), p=weights)
            endings = rng.integers(len(ENDINGS), size=chosen.shape)
            functions = rng.integers(len(FUNCTION_WORDS), size=chosen.shape)
            for row in range(some):
                words = [f"{stems[s]}{ENDINGS[e]}" for s, e in zip(chosen[row], endings[row], strict=True)]
                text = " ".join(f"{FUNCTION_WORDS[f]} {w}" for f, w in zip(functions[row], words, strict=True))
                file.write(json.dumps({"id": str(number), "contents": f'"{words[0]} {words[1]}"\n{text}.'}) + "\n")
                if number in asked:
                    made.queries.append(_query(rng, stems, chosen[row], endings[row]))
                    made.wanted.append(number)
                number += 1
    return made


def _query(rng: np.random.Generator, stems: np.ndarray, chosen: np.ndarray, endings: np.ndarray) -> str:
    """Make a query from four words of a passage."""
    words = []
    for place in rng.choice(len(chosen), size=4, replace=False):
        ending = endings[place] if rng.random() < 0.5 else rng.integers(len(ENDINGS))
        words.append(f"{FUNCTION_WORDS[rng.integers(len(FUNCTION_WORDS))]} {stems[chosen[place]]}{ENDINGS[ending]}")
    return f"what is {' '.join(words)}?"


def recall(found: Iterator[list[int]], wanted: list[int]) -> float:
    """Return the share of queries whose passage is among the results."""
    return statistics.fmean(number in each for each, number in zip(found, wanted, strict=True))


def recall_of_bm25s(made: Made) -> float:
    """Return the recall of bm25s."""
    stemmer = Stemmer.Stemmer("english")
    texts = [passage.contents for passage in Corpus(str(made.file))]
    peer = bm25s.BM25(k1=1.2, b=0.75)
    start = time.perf_counter()
    peer.index(bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False), show_progress=False)
    print(f"bm25s: {len(texts) / (time.perf_counter() - start):,.0f} passages/s, in memory")
    del texts
    asked = bm25s.tokenize(made.queries, stopwords="en", stemmer=stemmer, show_progress=False)
    found, _ = peer.retrieve(asked, k=COUNT, show_progress=False)
    return recall(iter(found.tolist()), made.wanted)


async def query_times(index: LocalIndex, queries: list[str], chains: int) -> list[float]:
    """Return the seconds of each query, of chains that search concurrently."""
    source, seconds = IndexSource(index), []

    async def chain(number: int) -> None:
        for query in queries[number::chains]:
            start = time.perf_counter()
            await source.search(query, COUNT)
            seconds.append(time.perf_counter() - start)

    await asyncio.gather(*map(chain, range(chains)))
    return seconds


def hostile_query(rng: random.Random, words: list[str]) -> str:
    """Make a query that might break parsers, around some of `words`."""
    parts = rng.choices(HOSTILE, k=rng.randint(0, 12)) + rng.choices(words, k=rng.randint(0, 4))
    parts += [chr(rng.randrange(0x110000)) for _ in range(rng.randint(0, 6))]
    rng.shuffle(parts)
    query = rng.choice(("", " ")).join(parts)
    return query * (10_000 // max(1, len(query))) if rng.random() < 0.01 else query


def _milliseconds(seconds: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(seconds, n=20)
    return cuts[9] * 1e3, cuts[18] * 1e3


def measure(folder: Path, passages: int, queries: int, hostile: int) -> dict[str, float]:
    """Print all results, and return the figures of the last line."""
    made = make(folder, passages, queries)
    start = time.perf_counter()
    build_index(Corpus(str(made.file)), folder / "index")
    speed = passages / (time.perf_counter() - start)
    size = sum(file.stat().st_size for file in (folder / "index").rglob("*") if file.is_file()) / passages
    print(f"built {passages:,} passages at {speed:,.0f}/s; {size:,.0f} bytes each on disk")

    index = LocalIndex(folder / "index")
    ours = recall(([int(hit.id) for hit in index.search(query, COUNT)] for query in made.queries), made.wanted)
    alone = _milliseconds(asyncio.run(query_times(index, made.queries, 1)))
    together = _milliseconds(asyncio.run(query_times(index, made.queries * 4, CHAINS)))
    for name, (p50, p95) in (("1 chain", alone), (f"{CHAINS} chains", together)):
        print(f"queries of {name}: p50 {p50:.1f} ms, p95 {p95:.1f} ms")

    rng, words = random.Random(0), " ".join(made.queries).split()
    start = time.perf_counter()
    for _ in range(hostile):
        index.search(hostile_query(rng, words), COUNT)
    print(f"{hostile:,} hostile queries: {hostile / (time.perf_counter() - start):,.0f}/s")
    theirs = recall_of_bm25s(made)
    print(f"recall@{COUNT}: {ours:.3f}; bm25s {theirs:.3f}")
    return {
        "passages_per_second": round(speed),
        "p50_ms": round(together[0], 2),
        "p95_ms": round(together[1], 2),
        "bytes_per_passage": round(size),
        "recall_vs_bm25s": round(ours / theirs, 3),
        "recall": round(ours, 3),
        "recall_bm25s": round(theirs, 3),
        "hostile_queries": hostile,
    }


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 passages and 5,000 hostile queries")
    quick = parser.parse_args().quick
    sizes = (20_000, 500, 5_000) if quick else (1_000_000, 2_000, 100_000)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), *sizes)), flush=True)


if __name__ == "__main__":
    main()

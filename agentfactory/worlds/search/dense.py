"""Dense retrieval: passages as vectors of a sentence-transformers model, in a usearch index beside the BM25 index."""

import io
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from agentfactory.rollout.model_hub import HubName, check_names, is_hub_name
from agentfactory.tools.errors import SettingError
from agentfactory.tools.files.disk import write_whole
from agentfactory.tools.user_code.extras import check_extra
from agentfactory.worlds.search.local_index import VECTORS, LocalIndex
from agentfactory.worlds.search.passage import Passage, encodable

_MODEL, _GRAPH = "model.json", "vectors.usearch"
_PART = 10_000
"""Maximum vectors per file while the model runs; a killed build repeats at most one file."""
_BATCH = 64
"""Passages per batch of the model."""
_QUERY_CHARACTERS = 20_000


def build_dense(
    passages: Iterable[Passage], folder: Path, model: str, progress: Callable[[int], None] = lambda done: None
) -> None:
    """Add the vectors of `passages` to the index in `folder`. Started again, it resumes a killed build.

    Raises SettingError if the model cannot be loaded, or its packages are not installed.
    """
    import numpy as np

    check_extra("dense")
    if Path(model).is_dir():
        # the index may be used from another working directory
        model = str(Path(model).resolve())
    place = folder / VECTORS
    if (place / _GRAPH).exists():
        return
    place.mkdir(exist_ok=True)
    encoder = _Encoder(model)
    if _read(place / _MODEL) != {"model": model}:
        # vectors of a killed build with another model
        for file in place.iterdir():
            file.unlink()
        write_whole(place / _MODEL, json.dumps({"model": model}).encode())
    parts = sorted(place.glob("*.npy"))
    done = sum(len(np.load(part, mmap_mode="r")) for part in parts)
    progress(done)
    batches = _batches(islice(passages, done, None), _BATCH)
    while some := list(islice(batches, _PART // _BATCH)):
        vectors = []
        for batch in some:
            vectors.append(encoder.passages([passage.contents for passage in batch]))
            done += len(batch)
            progress(done)
        part = place / f"{len(parts):06d}.npy"
        written = io.BytesIO()
        np.save(written, np.concatenate(vectors).astype(np.float16))
        write_whole(part, written.getvalue())
        parts.append(part)
    _write_graph(parts, len(encoder.query("")), place / _GRAPH)
    for part in parts:
        part.unlink()


def _write_graph(parts: Iterable[Path], dimensions: int, file: Path) -> None:
    """Write the HNSW graph of all vectors, with their positions in the corpus as keys."""
    import numpy as np
    from usearch.index import Index

    graph = Index(ndim=dimensions, metric="ip", dtype="f16")
    for part in parts:
        vectors = np.load(part)
        graph.add(np.arange(len(graph), len(graph) + len(vectors)), vectors)
    aside = file.with_suffix(".new")
    graph.save(str(aside))
    aside.replace(file)


def _batches(passages: Iterator[Passage], size: int) -> Iterator[list[Passage]]:
    while batch := list(islice(passages, size)):
        yield batch


class DenseIndex:
    """A dense index: ranks passages by the inner product of their vectors with the query's (approximate, HNSW).

    Raises SettingError if the model cannot be loaded, or its packages are not installed.
    """

    def __init__(self, passages: LocalIndex) -> None:
        check_extra("dense")
        from usearch.index import Index

        self._passages = passages
        try:
            model = json.loads((passages.folder / VECTORS / _MODEL).read_bytes())["model"]
            graph = Index.restore(str(passages.folder / VECTORS / _GRAPH), view=True)
            if graph is None or len(graph) != passages.passages:
                raise ValueError(f"{len(graph or ()):,} vectors for {passages.passages:,} passages")
        except (OSError, ValueError, RuntimeError) as error:
            problem = f"the vectors in {passages.folder} are damaged: {error}"
            raise SettingError("source", problem, "remove the index, and build it again") from None
        self._graph = graph
        self._encoder = _Encoder(model)

    def search(self, query: str, count: int) -> list[Passage]:
        """Return at most `count` passages by descending inner product with the query. Any text is a valid query; a
        query without a letter or digit finds nothing."""
        count = min(count, self._passages.passages)
        if count < 1 or not any(map(str.isalnum, query)):
            return []
        vector = self._encoder.query(query[:_QUERY_CHARACTERS])
        found = self._graph.search(vector, count)
        return [
            self._passages.at(int(key), score=1.0 - float(distance))
            for key, distance in zip(found.keys, found.distances, strict=True)
        ]


class _Encoder:
    """A sentence-transformers model with vectors normalized to length 1."""

    def __init__(self, model: str) -> None:
        from sentence_transformers import SentenceTransformer

        if is_hub_name(model):
            check_names([HubName("dense", model, "model")])
        try:
            self._model = SentenceTransformer(model)
        except (OSError, ValueError) as error:
            fix = "name a sentence-transformers model: a folder, or a model on the hub"
            raise SettingError("dense", f"{model} cannot be loaded: {error}", fix) from None
        # as in Search-R1: E5 models need these prompts, but their configuration lacks them
        is_e5 = "e5" in Path(model).name.lower() and not self._model.prompts.get("query")
        self._before_query, self._before_passage = ("query: ", "passage: ") if is_e5 else ("", "")
        # a fast tokenizer fails if two threads use it concurrently
        self._lock = threading.Lock()

    def passages(self, texts: list[str]) -> Any:
        """Return the passages' vectors: float32 [texts, dimensions]."""
        given = [self._before_passage + encodable(text) for text in texts]
        return self._model.encode_document(given, batch_size=_BATCH, normalize_embeddings=True, show_progress_bar=False)

    def query(self, text: str) -> Any:
        """Return the query's vector: float32 [dimensions]."""
        given = self._before_query + encodable(text)
        with self._lock:
            return self._model.encode_query(given, normalize_embeddings=True, show_progress_bar=False)


def _read(file: Path) -> Any:
    return json.loads(file.read_bytes()) if file.exists() else None

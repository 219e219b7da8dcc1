"""Dense retrieval: passages as vectors of a sentence-transformers model, in a usearch index beside the BM25 index."""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import write_whole
from agentfactory.base.user_code.extras import check_extra
from agentfactory.rollout.model_hub import HubName, check_names, is_hub_name
from agentfactory.worlds.search.local_index import VECTORS, LocalIndex
from agentfactory.worlds.search.passage import Passage, encodable

_MODEL, _RAW, _GRAPH = "model.json", "vectors.f16", "vectors.usearch"
_CHUNK = 256
"""Passages that the model gets at once, and sorts by length; a killed build repeats at most this many."""
_QUERY_CHARACTERS = 20_000
_GRAPH_CHUNK = 10_000
_FORMAT = 2
_SAME = 0.1
"""Maximum distance of two vectors of one text by one model, on other processors and in 16 bits; else about 1.4."""


@dataclass(frozen=True)
class EncoderSpec:
    """A sentence-transformers model, and the prefixes of queries and passages; None: those of the model."""

    model: str
    query_prefix: str | None = None
    passage_prefix: str | None = None


def build_dense(
    passages: Iterable[Passage],
    folder: Path,
    spec: EncoderSpec,
    progress: Callable[[int], None] = lambda done: None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Add the vectors of `passages` to the index in `folder`. Started again, it resumes a killed build. `progress`:
    receives the number of passages encoded so far, including those of a killed build. `say`: receives a description of
    the encoder, and a warning if it cuts passages. Raises SettingError if the model cannot be loaded, its packages are
    not installed, or its vectors are not numbers."""
    import numpy as np

    check_extra("dense")
    if Path(spec.model).is_dir():
        # the index may be used from another working directory
        spec = replace(spec, model=str(Path(spec.model).resolve()))
    place = folder / VECTORS
    place.mkdir(exist_ok=True)
    encoder = _Encoder(spec, "--dense", "name a sentence-transformers model: a folder, or a model on the hub")
    wanted = {**asdict(encoder.spec), "format": _FORMAT}
    if _read(place / _MODEL) != wanted:
        # vectors of a killed build with another model or other prefixes
        for old in place.iterdir():
            old.unlink()
        write_whole(place / _MODEL, json.dumps(wanted).encode())
    elif (place / _GRAPH).exists():
        return
    say(str(encoder))
    raw, bytes_each = place / _RAW, 2 * encoder.dimensions
    with raw.open("ab") as file:
        done = file.tell() // bytes_each
        # a killed build may have left a part of a vector
        file.truncate(done * bytes_each)
        progress(done)
        for chunk in _chunks(islice(passages, done, None), _CHUNK):
            texts = [passage.contents for passage in chunk]
            if done == 0 and (cut := encoder.cut(texts)):
                fix = "split long passages, or use a model that reads more"
                seen = f"of the first {len(texts):,} passages, {cut:,} are longer"
                say(f"{seen} than the model's {encoder.tokens} tokens, and their ends are not in their vectors; {fix}")
            vectors = encoder.passages(texts)
            if not np.isfinite(vectors).all():
                problem = f"{spec.model} gives passages vectors that are not numbers, such as passage {chunk[0].id}'s"
                raise SettingError("--dense", problem, "use another model, or float32 weights")
            file.write(vectors.astype(np.float16).tobytes())
            file.flush()
            done += len(chunk)
            progress(done)
    _write_graph(np.memmap(raw, np.float16, "r", shape=(done, encoder.dimensions)), place / _GRAPH)
    raw.unlink()


def _write_graph(vectors: Any, file: Path) -> None:
    """Write the HNSW graph of `vectors`, with their positions in the corpus as keys."""
    import numpy as np
    from usearch.index import Index

    graph = Index(ndim=vectors.shape[1], metric="ip", dtype="f16")
    for start in range(0, len(vectors), _GRAPH_CHUNK):
        some = vectors[start : start + _GRAPH_CHUNK]
        graph.add(np.arange(start, start + len(some)), some)
    aside = file.with_suffix(".new")
    graph.save(str(aside))
    aside.replace(file)


def _chunks(passages: Iterator[Passage], size: int) -> Iterator[list[Passage]]:
    while chunk := list(islice(passages, size)):
        yield chunk


class DenseIndex:
    """A dense index: ranks passages by the inner product of their vectors with the query's (approximate, HNSW). Raises
    SettingError if files are damaged, packages are missing, or the model fails to load or gives other vectors."""

    def __init__(self, passages: LocalIndex) -> None:
        check_extra("dense")
        from usearch.index import Index

        self._passages = passages
        place = passages.folder / VECTORS
        try:
            stored = _read(place / _MODEL)
            spec = EncoderSpec(**{field.name: stored.get(field.name) for field in fields(EncoderSpec)})
            graph = Index.restore(str(place / _GRAPH), view=True)
            if graph is None or len(graph) != passages.passages:
                raise ValueError(f"{len(graph or ()):,} vectors for {passages.passages:,} passages")
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            problem = f"the vectors in {passages.folder} are damaged: {error}"
            raise SettingError("source", problem, "remove the index, and build it again") from None
        self._graph = graph
        fix = f"put the model of the index there, or write its new place into {place / _MODEL}"
        self._encoder = _Encoder(spec, "source", fix)
        self._check_model(spec.model, fix)

    def _check_model(self, model: str, fix: str) -> None:
        """Raise SettingError if the model does not reproduce the vector of the first passage."""
        import numpy as np

        there: Any = self._graph.get(0)
        here = self._encoder.passages([self._passages.at(0).contents])[0]
        if there is None or there.shape != here.shape or not np.linalg.norm(there.astype(np.float32) - here) < _SAME:
            problem = f"the vectors in {self._passages.folder} were not made by the model that is now in {model}"
            raise SettingError("source", problem, f"{fix}, or build the index again")

    def search(self, query: str, count: int) -> list[Passage]:
        """Return at most `count` passages by inner product; nothing for a query without a letter or digit."""
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
    """A sentence-transformers model with vectors normalized to length 1. `spec` has the prefixes that it uses. Raises
    SettingError for `field`, with `fix`, if it cannot be loaded."""

    def __init__(self, spec: EncoderSpec, field: str, fix: str) -> None:
        from sentence_transformers import SentenceTransformer

        if is_hub_name(spec.model):
            check_names([HubName(field, spec.model, "model")])
        try:
            self._model = SentenceTransformer(spec.model)
        except Exception as error:  # boundary: each of a model's files has its own library and exceptions
            problem = f"{spec.model} cannot be loaded: {type(error).__name__}: {error}"
            raise SettingError(field, problem, fix) from None
        self._tokenizer = getattr(self._model, "tokenizer", None)
        network = getattr(self._model[0], "auto_model", None)
        size = getattr(getattr(network, "config", None), "vocab_size", 0)
        # without its files, transformers makes a tokenizer that reads every word as unknown
        if isinstance(self._tokenizer, Sized) and 2 * len(self._tokenizer) < size:
            problem = f"{spec.model} has a tokenizer of {len(self._tokenizer):,} tokens for a network of {size:,}"
            raise SettingError(field, problem, "add the model's own tokenizer.json to the folder")
        self.tokens: int | None = self._model.max_seq_length if network is not None else None
        """Length in tokens at which a text is cut, or None."""
        self.dimensions = len(self._model.encode("text", show_progress_bar=False))
        # as in Search-R1: E5 models need these prompts, but their configuration lacks them
        names = re.split(r"[^a-z0-9]+", Path(spec.model).name.lower())
        is_e5 = "e5" in names and "instruct" not in names and not self._model.prompts.get("query")
        own = ("query: ", "passage: ") if is_e5 else tuple(self._own_prompt(kind) for kind in ("query", "document"))
        given = (spec.query_prefix, spec.passage_prefix)
        query, passage = (mine if text is None else text for mine, text in zip(own, given, strict=True))
        self.spec = EncoderSpec(spec.model, query, passage)
        # a fast tokenizer fails if two threads use it concurrently
        self._lock = threading.Lock()

    def __str__(self) -> str:
        pooling = [each.pooling_mode for each in self._model if hasattr(each, "pooling_mode")]
        parts = [f"vectors of {self.dimensions} numbers", *(f"{each} pooling" for each in pooling)]
        parts += [] if self.tokens is None else [f"at most {self.tokens} tokens"]
        prefixes = f"prefixes {self.spec.query_prefix!r} (queries) and {self.spec.passage_prefix!r} (passages)"
        return f"{self.spec.model}: {', '.join(parts)}; {prefixes}"

    def _own_prompt(self, kind: str) -> str:
        """Return the model's prompt for queries or documents, by the names that sentence-transformers looks up."""
        names = ("query",) if kind == "query" else ("document", "passage", "corpus")
        prompts: dict[str, str | None] = self._model.prompts
        return next((prompts[name] or "" for name in names if name in prompts), "")

    def cut(self, texts: list[str]) -> int:
        if self.tokens is None or self._tokenizer is None:
            return 0
        given = [f"{self.spec.passage_prefix}{encodable(text)}" for text in texts]
        read = self._tokenizer(given, truncation=True, max_length=self.tokens + 1)["input_ids"]
        return sum(len(each) > self.tokens for each in read)

    def passages(self, texts: list[str]) -> Any:
        return self._encode(self._model.encode_document, list(map(encodable, texts)), self.spec.passage_prefix)

    def query(self, text: str) -> Any:
        with self._lock:
            return self._encode(self._model.encode_query, encodable(text), self.spec.query_prefix)

    def _encode(self, encode: Callable[..., Any], texts: Any, prefix: str | None) -> Any:
        return encode(texts, prompt=prefix, batch_size=64, normalize_embeddings=True, show_progress_bar=False)


def _read(file: Path) -> Any:
    return json.loads(file.read_bytes()) if file.exists() else None

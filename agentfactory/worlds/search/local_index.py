"""A BM25 index of passages on disk (tantivy), built from a stream and resumable after a kill."""

import fcntl
import json
import os
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import regex
import tantivy

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import write_whole, writing
from agentfactory.base.files.lock_file import holder, open_lock
from agentfactory.worlds.search.passage import Passage, encodable

MANIFEST = "index.json"
_FORMAT = 1
_TERMS = "bm25"
"""Folder of tantivy's files within an index."""
VECTORS = "dense"
"""Folder of a dense model's vectors within an index."""
_ANALYZER = "passages"
_COMMIT_PASSAGES = 100_000
"""Passages between commits; a killed build repeats at most this many."""
_HEAP_BYTES = 256 << 20
_QUERY_CHARACTERS = 20_000
_QUERY_TERMS = 64
_COMMON_SHARE, _COMMON_PASSAGES = 0.4, 50_000
"""A word is common ("the", "of") if it is in more than this share and more than this number of passages."""
_UNSPACED = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]")
"""Scripts without spaces between words. Each character is a term, as in Lucene's StandardAnalyzer for Han."""
_LANGUAGES = (
    *("arabic", "danish", "dutch", "english", "finnish", "french", "german", "greek", "hungarian", "italian"),
    *("norwegian", "portuguese", "romanian", "russian", "spanish", "swedish", "tamil", "turkish"),
)


def build_index(
    passages: Iterable[Passage],
    folder: Path,
    corpus: str = "",
    language: str | None = "english",
    progress: Callable[[int], None] = lambda done: None,
    finish: Callable[[Path], None] | None = None,
) -> int:
    """Build an index of `passages` in `folder`, which must not exist; return the number of passages.

    The index is written to `folder`.building and renamed when complete. Started again with the same `corpus` and
    `language`, a killed build resumes after its last commit and skips the passages before it. Memory does not grow with
    the number of passages. A search breaks ties by corpus order in an index of up to 100,000 passages; in a larger
    index the order of ties may differ between two builds.

    Args:
        corpus: identifies the passages, so that a build resumes only with the same ones; "": never resume.
        language: language for stemming; None: no stemming.
        progress: receives the number of passages read so far, including skipped ones.
        finish: adds files to the folder before it is renamed.

    Raises:
        SettingError: `folder` exists or cannot be created, another process builds it, the language is unknown, or there
            are no passages.
        DiskError: the disk is full.
    """
    if folder.exists():
        raise SettingError("folder", f"{folder} exists", "choose another folder, or remove it")
    if language is not None and language not in _LANGUAGES:
        raise SettingError("language", f"got {language!r}", f"use none, or one of {', '.join(_LANGUAGES)}")
    # reads the first passage before anything is created: an unreadable corpus leaves nothing behind
    passages = iter(passages)
    first = list(islice(passages, 1))
    if not first:
        raise SettingError("corpus", "it contains no passages", "name another file, data set or split")
    passages = chain(first, passages)
    unfinished = folder.with_name(f"{folder.name}.building")
    made = {"format": _FORMAT, "corpus": corpus, "language": language}
    with writing(unfinished), _alone(unfinished):
        # the manifest of a build killed just before the rename also has the number of passages
        found = _read_manifest(unfinished) or {}
        if not corpus or {name: found.get(name) for name in made} != made:
            # files of another build, or of passages that may differ
            for part in (_TERMS, VECTORS):
                shutil.rmtree(unfinished / part, ignore_errors=True)
        (unfinished / _TERMS).mkdir(exist_ok=True)
        _write_manifest(unfinished, made)
        total = _add_all(passages, _open_terms(unfinished, language), progress)
        if finish is not None:
            finish(unfinished)
        _write_manifest(unfinished, {**made, "passages": total})
        os.rename(unfinished, folder)
        _sync_folder(folder.parent)
    return total


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Create `folder` and lock it against other builds."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError("folder", f"{folder} cannot be made: {error}", "choose another folder") from error
    lock = open_lock(folder / "build.lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        problem = f"another process is building an index in {folder}: {holder(lock)}"
        os.close(lock)
        raise SettingError("folder", problem, "wait for it, or end it") from None
    try:
        yield
    finally:
        os.close(lock)


def _add_all(passages: Iterable[Passage], index: tantivy.Index, progress: Callable[[int], None]) -> int:
    index.reload()
    # each passage is one document, so the document count shows where the last commit ended
    number = index.searcher().num_docs
    progress(number)
    # insertion order breaks ties between equal scores, and several threads would insert in any order
    writer = index.writer(_HEAP_BYTES, num_threads=1 if number < _COMMIT_PASSAGES else 0)
    for passage in islice(passages, number, None):
        writer.add_document(_document(number, passage))
        number += 1
        if number % _COMMIT_PASSAGES == 0:
            writer.commit()
            if number == _COMMIT_PASSAGES:
                writer.wait_merging_threads()
                writer = index.writer(_HEAP_BYTES)
        if number % 1000 == 0:
            progress(number)
    writer.commit()
    writer.wait_merging_threads()
    progress(number)
    return number


class LocalIndex:
    """An index made by `build_index`, thread-safe. Raises SettingError if there is none, or it is damaged."""

    def __init__(self, folder: Path) -> None:
        manifest = _read_manifest(folder)
        if manifest is None or "passages" not in manifest:
            building = Path(f"{folder}.building").exists()
            fix = "run the same `agentfactory index build` again" if building else "agentfactory index build CORPUS"
            raise SettingError("source", f"there is no index in {folder}", f"{fix} --output {folder}")
        if manifest["format"] != _FORMAT:
            raise SettingError("source", f"{folder} has format {manifest['format']}, not {_FORMAT}", "build it again")
        self.folder = folder
        self.passages: int = manifest["passages"]
        self.has_vectors = (folder / VECTORS).is_dir()
        self._analyzer = _analyzer(manifest["language"])
        try:
            self._index = _open_terms(folder, manifest["language"])
            self._searcher = self._index.searcher()
            if self._searcher.num_docs != self.passages:
                raise ValueError(f"it has {self._searcher.num_docs:,} of {self.passages:,} passages")
        except ValueError as error:
            problem = f"the index in {folder} is damaged: {error}"
            raise SettingError("source", problem, "remove it, and build it again") from None

    def search(self, query: str, count: int) -> list[Passage]:
        """Return at most `count` passages by descending BM25 score. Any text is a valid query: its words are looked up,
        and nothing in it is an operator. Of a long query, only the 64 rarest words in the first 20,000 characters
        count. In a large index, words as common as "the" count only if the query has no others."""
        terms = self._terms(query)
        if not terms or count < 1:
            return []
        schema = self._index.schema
        any_term = [(tantivy.Occur.Should, tantivy.Query.term_query(schema, "terms", term, "freq")) for term in terms]
        found = self._searcher.search(tantivy.Query.boolean_query(any_term), min(count, self.passages), count=False)
        return [self._passage(address, score) for score, address in found.hits]

    def at(self, number: int, score: float | None = None) -> Passage:
        """Return the passage at position `number` of the corpus, from 0, with the given score."""
        query = tantivy.Query.term_query(self._index.schema, "number", number)
        found = self._searcher.search(query, 1, count=False).hits
        if not found:
            raise IndexError(f"{self.folder} has no passage {number}")
        return self._passage(found[0][1], score)

    def _terms(self, query: str) -> list[str]:
        """Return the rarest words of the query; common ones, which take the most time, only if there are no others."""
        terms = dict.fromkeys(self._analyzer.analyze(_searchable(query[:_QUERY_CHARACTERS])))
        frequency = {term: self._searcher.doc_freq("terms", term) for term in terms}
        found = sorted((term for term in terms if frequency[term]), key=frequency.__getitem__)[:_QUERY_TERMS]
        most = max(_COMMON_PASSAGES, self.passages * _COMMON_SHARE)
        return [term for term in found if frequency[term] <= most] or found

    def _passage(self, address: tantivy.DocAddress, score: float | None = None) -> Passage:
        stored: dict[str, list[Any]] = self._searcher.doc(address).to_dict()
        url = stored.get("url", [None])[0]
        return Passage(stored["id"][0], bytes(stored["contents"][0]).decode(), score, url)


def _open_terms(folder: Path, language: str | None) -> tantivy.Index:
    index = tantivy.Index(_SCHEMA, str(folder / _TERMS))
    index.register_tokenizer(_ANALYZER, _analyzer(language))
    return index


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("terms", tokenizer_name=_ANALYZER, index_option="freq")
    builder.add_text_field("id", stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_unsigned_field("number", indexed=True)
    builder.add_bytes_field("contents", stored=True)
    builder.add_text_field("url", stored=True, tokenizer_name="raw", index_option="basic")
    return builder.build()


_SCHEMA = _schema()


def _analyzer(language: str | None) -> tantivy.TextAnalyzer:
    filters = [tantivy.Filter.remove_long(64), tantivy.Filter.lowercase(), tantivy.Filter.ascii_fold()]
    if language is not None:
        filters.append(tantivy.Filter.stemmer(language))
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    for each in filters:
        builder = builder.filter(each)
    return builder.build()


def _document(number: int, passage: Passage) -> tantivy.Document:
    document = tantivy.Document()
    document.add_text("id", encodable(passage.id))
    document.add_unsigned("number", number)
    document.add_text("terms", _searchable(passage.contents))
    document.add_bytes("contents", passage.contents.encode("utf-8", "replace"))
    if passage.url is not None:
        document.add_text("url", encodable(passage.url))
    return document


def _searchable(text: str) -> str:
    """Normalize `text` for the analyzer: NFKC, with spaces around characters of unspaced scripts."""
    if text.isascii():
        return text
    return _UNSPACED.sub(r" \g<0> ", unicodedata.normalize("NFKC", encodable(text)))


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Dense retrieval and its fusion with BM25, with a generated model of random word vectors."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.import_path import is_installed
from agentfactory.commands.main import main
from agentfactory.worlds.search import dense
from agentfactory.worlds.search.dense import EncoderSpec
from agentfactory.worlds.search.local_index import build_index
from agentfactory.worlds.search.passage import Passage
from agentfactory.worlds.search.ranking import open_index
from tests.worlds.search.corpora import PLAYS, write_jsonl

pytestmark = pytest.mark.skipif(
    not (is_installed("sentence_transformers") and is_installed("usearch")),
    reason="needs dense retrieval: pip install 'agentfactory-rl[dense]'",
)
WORDS = [
    *("query", "passage", "hamlet", "macbeth", "faust", "tragedy", "drama", "wager", "bet"),
    *("scottish", "general", "prince", "goethe", "shakespeare"),
]

SYNONYMS = {"drama": "tragedy", "bet": "wager"}


def make_model(folder: Path, seed: int = 0, scale: float = 1.0) -> str:
    """Save a model whose vectors are sums of random word vectors; synonyms have the same vector."""
    import numpy as np
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    vocabulary = {"[UNK]": 0} | {word: number for number, word in enumerate(WORDS, 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = np.random.default_rng(seed).normal(size=(len(vocabulary), 32)).astype(np.float32) * scale
    vectors[0] *= 0.01
    for word, same in SYNONYMS.items():
        vectors[vocabulary[word]] = vectors[vocabulary[same]]
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=vectors)]).save(str(folder))
    return str(folder)


def _encoder(model: str, query: str | None = None, passage: str | None = None) -> dense._Encoder:
    return dense._Encoder(EncoderSpec(model, query, passage), "dense", "name a model")


def dense_index(folder: Path, model: str | EncoderSpec, passages: list[Passage] = PLAYS, **options: Any) -> Path:
    spec = model if isinstance(model, EncoderSpec) else EncoderSpec(model)
    build_index(passages, folder, "c", finish=lambda place: dense.build_dense(passages, place, spec, **options))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    return dense_index(tmp_path_factory.mktemp("dense") / "index", model)


def test_meaning_finds_what_words_do_not(index: Path) -> None:
    query = "drama, bet"
    assert open_index(index, "bm25").search(query, 1) == []
    (first, *rest) = open_index(index, "dense").search(query, 5)
    assert first.contents == PLAYS[2].contents
    assert len(rest) == 4
    scores = [passage.score or 0.0 for passage in (first, *rest)]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 0.5
    assert open_index(index).search(query, 1)[0].id == "f"  # hybrid, because it has vectors


@pytest.mark.parametrize("ranking", ["dense", "hybrid"])
def test_any_text_is_a_query(index: Path, ranking: str) -> None:
    opened = open_index(index, ranking)
    for query in ("", "  ", '"(', "\x00"):
        assert opened.search(query, 3) == []
    for query in ("hamlet \ud800", "title: hamlet AND", "hamlet " * 2000, "東京"):
        assert len(opened.search(query, 3)) == 3
    assert opened.search("hamlet", 0) == []
    assert len(opened.search("hamlet", 10**9)) == len(PLAYS)


def test_scores_are_inner_products_of_unit_vectors(index: Path, model: str) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(model)
    texts = [passage.contents for passage in PLAYS]
    expected = encoder.encode(texts, normalize_embeddings=True) @ encoder.encode("wager", normalize_embeddings=True)
    found = {passage.id: passage.score for passage in open_index(index, "dense").search("wager", 5)}
    assert found == {passage.id: pytest.approx(score, abs=2e-3) for passage, score in zip(PLAYS, expected, strict=True)}


def test_e5_models_get_their_prefixes(tmp_path: Path, model: str) -> None:
    plain = _encoder(model)
    e5 = _encoder(make_model(tmp_path / "e5-tiny"))
    assert e5.query("hamlet") == pytest.approx(plain.query("query: hamlet"))
    assert e5.passages(["hamlet"])[0] == pytest.approx(plain.query("passage: hamlet"))
    assert plain.query("hamlet") != pytest.approx(plain.query("query: hamlet"))
    # these models have instructions instead, and "base512" is not E5
    for name in ("e5-mistral-7b-instruct", "base512"):
        assert _encoder(make_model(tmp_path / name)).query("hamlet") == pytest.approx(plain.query("hamlet"))


def test_given_prefixes_are_kept_in_the_index(tmp_path: Path, model: str) -> None:
    spec, said = EncoderSpec(model, "hamlet ", "faust "), list[str]()
    dense_index(tmp_path / "index", spec, say=said.append)
    assert said == [f"{model}: vectors of 32 numbers; prefixes 'hamlet ' (queries) and 'faust ' (passages)"]
    scores = {passage.id: passage.score for passage in open_index(tmp_path / "index", "dense").search("wager", 5)}
    plain = _encoder(model)
    for passage in PLAYS:
        expected = plain.query("hamlet wager") @ plain.query(f"faust {passage.contents}")
        assert scores[passage.id] == pytest.approx(expected, abs=2e-3)


def test_another_model_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    index = dense_index(tmp_path / "index", model)
    shutil.rmtree(model)
    with pytest.raises(SettingError, match=r"source: .*model cannot be loaded: .*; fix: put the model of the index"):
        open_index(index)
    make_model(tmp_path / "model", seed=1)
    with pytest.raises(SettingError, match=r"the vectors in .* were not made by the model that is now in .*; fix:"):
        open_index(index)


def test_vectors_of_a_killed_build_are_kept(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_CHUNK", 4)
    passages = [Passage(str(number), f"t\n{WORDS[number % len(WORDS)]} {number}") for number in range(11)]

    def killed() -> Iterator[Passage]:
        yield from passages[:9]
        raise KeyboardInterrupt

    folder = tmp_path / "index"
    with pytest.raises(KeyboardInterrupt):
        build_index(passages, folder, "c", finish=lambda place: dense.build_dense(killed(), place, EncoderSpec(model)))
    raw = tmp_path / "index.building" / "dense" / "vectors.f16"
    raw.write_bytes(raw.read_bytes() + b"\x01" * 7)  # a part of a vector
    done: list[int] = []
    dense_index(folder, model, passages, progress=done.append)
    assert done == [8, 11]
    assert sorted(file.name for file in (folder / "dense").iterdir()) == ["model.json", "vectors.usearch"]
    opened = open_index(folder, "dense")
    for passage in passages[2:]:
        # the other result may be a synonym's
        assert passage.id in [found.id for found in opened.search(passage.text.split()[0], 2)]


def test_a_dense_index_is_built_by_the_command(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"id": p.id, "contents": p.contents} for p in PLAYS])
    build = ["index", "build", str(corpus), "--output"]
    assert main([*build, str(tmp_path / "index"), "--dense", model]) == 0
    assert capsys.readouterr().out.startswith("indexed 5 passages in ")
    assert open_index(tmp_path / "index", "dense").search("a drama with a bet", 1)[0].id == "f"
    assert main([*build, str(tmp_path / "x"), "--dense", str(tmp_path / "no-model")]) == 2
    assert "no-model cannot be loaded: " in capsys.readouterr().err
    assert main([*build, str(tmp_path / "x"), "--query-prefix", "q"]) == 2
    assert "--query-prefix: only the model of --dense uses it; fix: add --dense MODEL" in capsys.readouterr().err

"""The BM25 index on disk: results, queries, and resumed builds."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfactory.base.errors import SettingError
from agentfactory.commands.main import main
from agentfactory.worlds.search import local_index
from agentfactory.worlds.search.corpus import Corpus
from agentfactory.worlds.search.local_index import LocalIndex, build_index
from agentfactory.worlds.search.passage import Passage
from agentfactory.worlds.search.ranking import reciprocal_rank
from tests.worlds.search.corpora import PLAYS, index_of, write_jsonl


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> LocalIndex:
    return LocalIndex(index_of(tmp_path_factory.mktemp("plays")))


def _ids(index: LocalIndex, query: str, count: int = 3) -> list[str]:
    return [passage.id for passage in index.search(query, count)]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("hamlet", "h"),
        ("title: hamlet", "h"),
        ("+hamlet AND (NOT", "h"),
        ("id:f hamlet^9 ~ [a TO b]", "h"),
        ("HESITATED", "h"),  # found by its stem
        ("東京", "t"),
        ("CAFE\u0301", "c"),  # the accent as a separate character
        ("goethe " * 2000, "f"),
        ("hamlet \ud800", "h"),  # a lone surrogate, which JSON can hold
    ],
)
def test_a_query_finds_its_words_and_nothing_in_it_is_an_operator(plays: LocalIndex, query: str, first: str) -> None:
    assert _ids(plays, query, 1) == [first]


@pytest.mark.parametrize("query", ["", "   ", '"', "()[]{}:^~*?\\/", "\x00", "\u200b", "🤖", "zyzzyva"])
def test_a_query_without_a_known_word_finds_nothing(plays: LocalIndex, query: str) -> None:
    assert plays.search(query, 3) == []


@given(st.text() | st.text(alphabet='ab"():+-*~^[]{}\\/ANDORT hamlet', max_size=200))
def test_no_query_raises(plays: LocalIndex, query: str) -> None:
    assert len(plays.search(query, 2)) <= 2


def test_the_best_comes_first_with_all_that_was_stored(plays: LocalIndex) -> None:
    found = plays.search("tragedy about a wager", 10)
    assert {passage.id for passage in found} == {"h", "m", "f"}
    assert found[0].contents == PLAYS[2].contents
    assert (found[0].title, found[0].url) == ("Faust", "http://127.0.0.1/faust")
    assert plays.search("tragedy", 0) == []
    assert len(plays.search("tragedy", 10**12)) == 3


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"there is no index in .*none; fix: agentfactory index build CORPUS"):
        LocalIndex(tmp_path / "none")
    folder = index_of(tmp_path)
    manifest = json.loads((folder / local_index.MANIFEST).read_text())
    (folder / local_index.MANIFEST).write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(SettingError, match="has format 99, not 1; fix: build it again"):
        LocalIndex(folder)
    with pytest.raises(SettingError, match=r"folder: .*index exists; fix: choose another folder, or remove it"):
        build_index(PLAYS, folder)
    for wrong in (folder / local_index.MANIFEST / "index", Path("/proc/none/index")):
        with pytest.raises(SettingError, match=r"folder: .*index.building cannot be made: .*; fix: choose another"):
            build_index(PLAYS, wrong)


def test_damaged_files_are_told(tmp_path: Path) -> None:
    files = index_of(tmp_path) / "bm25"
    store = next(files.glob("*.store"))
    store.write_bytes(store.read_bytes()[:-20])
    with pytest.raises(SettingError, match=r"the index in .* is damaged: .*; fix: remove it, and build it again"):
        LocalIndex(tmp_path / "index")
    # tantivy creates an empty index in a folder without this file
    (files / "meta.json").unlink()
    with pytest.raises(SettingError, match="is damaged: it has 0 of 5 passages"):
        LocalIndex(tmp_path / "index")


# builds an index of a file, and kills itself after a given number of passages
_KILLED = """
import os, signal, sys
from pathlib import Path
from agentfactory.worlds.search import local_index
from agentfactory.worlds.search.corpus import Corpus

def passages(corpus, most):
    for number, passage in enumerate(corpus):
        if number == most:
            os.kill(os.getpid(), signal.SIGKILL)
        yield passage

local_index._COMMIT_PASSAGES = 100
corpus = Corpus(sys.argv[1])
local_index.build_index(passages(corpus, int(sys.argv[3])), Path(sys.argv[2]), corpus.name)
"""


@pytest.mark.processes
def test_a_build_that_was_killed_is_resumed(tmp_path: Path) -> None:
    rows = [{"id": number, "contents": f'"t{number}"\nword{number} number{number % 7}'} for number in range(1000)]
    file, folder = write_jsonl(tmp_path / "corpus.jsonl", rows), tmp_path / "index"
    for most in (250, 780):
        killed = subprocess.run([sys.executable, "-c", _KILLED, str(file), str(folder), str(most)], timeout=60)
        assert killed.returncode == -9
        assert not folder.exists()
        with pytest.raises(SettingError, match="fix: run the same `agentfactory index build` again"):
            LocalIndex(folder)
    done: list[int] = []
    corpus = Corpus(str(file))
    assert build_index(corpus, folder, corpus.name, progress=done.append) == 1000
    assert (done[0], done[-1]) == (700, 1000)  # the passages that the second build had committed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]
    index = LocalIndex(folder)
    assert index.passages == 1000
    assert all(_ids(index, f"word{number}", 2) == [str(number)] for number in range(1000))


def test_a_build_does_not_go_on_with_another_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_index, "_COMMIT_PASSAGES", 3)

    def broken(passages: list[Passage]) -> Iterator[Passage]:
        yield from passages
        raise KeyboardInterrupt

    old = [Passage(str(number), "old\nword") for number in range(4)]
    for name in ("old", ""):
        with pytest.raises(KeyboardInterrupt):
            build_index(broken(old), tmp_path / "index", name)
        done: list[int] = []
        build_index(PLAYS, tmp_path / "index", "new" if name else "", progress=done.append)
        assert done == [0, len(PLAYS)]
        index = LocalIndex(tmp_path / "index")
        assert index.search("old", 1) == []
        index.folder.rename(tmp_path / f"done-{name}")


def test_two_builds_of_one_index_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "index"

    def passages() -> Iterator[Passage]:
        yield PLAYS[0]
        for corpus in ("plays", "others", ""):
            with pytest.raises(SettingError, match=r"another process is building an index in .*building: pid .*; fix"):
                build_index(PLAYS, folder, corpus)
        yield PLAYS[1]

    assert build_index(passages(), folder, "plays") == 2
    assert LocalIndex(folder).passages == 2


def test_the_scores_are_those_of_bm25(tmp_path: Path) -> None:
    """The formula with k1 = 1.2 and b = .75; lengths are stored exactly up to 40 words."""
    texts = ["red fish", "blue fish blue", "one red dog and one cat"]
    index = LocalIndex(index_of(tmp_path, [Passage(str(n), f"\n{text}") for n, text in enumerate(texts)]))
    lengths = [len(text.split()) for text in texts]
    average = sum(lengths) / 3
    # idf of a word in one passage of three: ln(1 + (3 - 1 + .5) / (1 + .5))
    idf = 0.9808292530117262
    expected = idf * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * lengths[1] / average))
    (found,) = index.search("blue", 3)
    assert found.score == pytest.approx(expected, rel=1e-5)


def test_fusion_adds_the_reciprocal_ranks() -> None:
    a, b, c = (Passage(name, name, score=9.0) for name in "abc")
    fused = reciprocal_rank([[a, b], [c, b]])
    assert [(passage.id, passage.score) for passage in fused] == [("b", 2 / 62), ("a", 1 / 61), ("c", 1 / 61)]
    assert reciprocal_rank([[], []]) == []
    same_id = [Passage("a", "one"), Passage("a", "two")]
    assert [passage.contents for passage in reciprocal_rank([same_id, same_id])] == ["one", "two"]


def test_the_command_builds_an_index_that_the_tool_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": number, "contents": f'"T{number}"\nword{number}'} for number in range(20)]
    corpus, folder = write_jsonl(tmp_path / "c.jsonl", rows), tmp_path / "deep" / "index"
    assert main(["index", "build", str(corpus), "--output", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("indexed 20 passages in ")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"mcp_servers:\n  search:\n    module: search\n    options: {{source: {folder}}}\n")
    assert main(["tools", "call", str(recipe), "search", "query=title: word7 AND"]) == 0
    assert capsys.readouterr().out == 'Doc 1(Title: "T7") word7\ninfo: {"documents": ["7"]}\n'
    assert main(["tools", "check", str(recipe)]) == 0
    assert main(["tools", "list", str(recipe)]) == 0
    assert "search: search(query: string)" in capsys.readouterr().out

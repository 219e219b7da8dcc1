"""Corpora: files and data sets as passages, and errors for invalid rows."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from agentfactory.base.errors import SettingError
from agentfactory.worlds.search.corpus import Corpus
from agentfactory.worlds.search.passage import Passage
from tests.worlds.search.corpora import write_jsonl

ROWS = [
    {"id": "a", "contents": '"Hamlet"\nA play.'},
    {"_id": 7, "title": "Faust", "text": "Another\nplay.", "url": "http://127.0.0.1/f", "year": 1808},
    {"text": "No title."},
]
PASSAGES = [
    Passage("a", '"Hamlet"\nA play.'),
    Passage("7", '"Faust"\nAnother\nplay.', url="http://127.0.0.1/f"),
    Passage("2", "\nNo title."),
]


def test_json_lines_plain_and_compressed(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "c.jsonl", ROWS)
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes() + b"\n  \n"))
    assert list(Corpus(str(plain))) == PASSAGES
    assert list(Corpus(str(packed))) == PASSAGES
    assert PASSAGES[2].title == ""
    assert PASSAGES[2].text == "No title."


def test_files_as_other_programs_write_them(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    files = {
        "mark.jsonl": b"\xef\xbb\xbf" + text.encode(),
        "windows.JSONL": text.replace("\n", "\r\n\r\n").encode(),
        "LIST.JSON.GZ": gzip.compress(b"\xef\xbb\xbf" + json.dumps(ROWS, indent=1).encode()),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert list(Corpus(str(tmp_path / name))) == PASSAGES, name
    (tmp_path / "c.csv").write_bytes(b'\xef\xbb\xbfid,title,text\r\n1,Hamlet,"A play, \r\nlong."\r\n')
    assert list(Corpus(str(tmp_path / "c.csv"))) == [Passage("1", '"Hamlet"\nA play, \r\nlong.')]
    (tmp_path / "c.jsonl").write_bytes(b'{"id": 1, "contents": "lone \\ud800\\nsurrogate"}\n')
    assert [passage.contents for passage in Corpus(str(tmp_path / "c.jsonl"))] == ["lone \ud800\nsurrogate"]


def test_parquet_and_data_sets(tmp_path: Path) -> None:
    columns = {"id": ["1", "2"], "title": ["Hamlet", None], "text": ["A play.", "A text."]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    expected = [Passage("1", '"Hamlet"\nA play.'), Passage("2", "\nA text.")]
    assert list(Corpus(str(tmp_path / "train.parquet"))) == expected
    # `datasets` reads a folder by the same code as the hub
    assert list(Corpus(str(tmp_path))) == expected


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", r"c.jsonl:2 is not JSON: .* at column [12]; fix: correct it"),
        ("[1]", r"c.jsonl:2 is a list, not an object; fix: give it id and contents"),
        ('{"id": 1, "body": "x"}', r"c.jsonl:2 has neither contents nor text but id, body; fix: rename a field"),
        ('{"id": 1, "contents": 5}', r"c.jsonl:2: contents is 5, not a string; fix: make contents a string"),
        ('{"id": [1], "contents": ""}', r"c.jsonl:2: id is \[1\], not a string"),
        ('{"id": 1, "text": "", "title": {}}', r"c.jsonl:2: title is {}, not a string"),
    ],
)
def test_a_bad_line_is_told_with_file_line_field_and_fix(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(f"{json.dumps(ROWS[0])}\n{line}\n")
    with pytest.raises(SettingError, match=told):
        list(Corpus(str(file)))


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    def refused(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SettingError) as error:
            list(Corpus(str(tmp_path / name)))
        return str(error.value)

    assert "is not UTF-8" in refused("latin.jsonl", b'{"id": 1, "contents": "caf\xe9"}\n')
    packed = gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS * 100))
    assert "is damaged" in refused("cut.jsonl.gz", packed[:-20])
    assert "is damaged" in refused("flipped.jsonl.gz", packed[:40] + bytes(20) + packed[60:])
    assert "cannot be read as parquet" in refused("p.parquet", b"no parquet")
    columns = {"text": [f"text {number}" for number in range(100)]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    assert "cannot be read as parquet" in refused("flipped.parquet", whole[:40] + bytes(40) + whole[80:])
    assert "deep.jsonl:1 cannot be read as JSON: maximum recursion" in refused("deep.jsonl", b"[" * 200_000)
    assert "c.tsv is neither a .jsonl, .json, .csv or .parquet file nor" in refused("c.tsv", b"id\tcontents\n")
    assert "c.csv:2 does not have 2 cells" in refused("c.csv", b"id,contents\na\n")
    assert "a.json holds a dict, not a list of rows" in refused("a.json", b"{}")
    with pytest.raises(SettingError, match="is not a file, and cannot be read as a hub data set"):
        list(Corpus(str(tmp_path / "nothing")))
    with pytest.raises(SettingError, match=r"there is no file wiki\.jsonl\.gz; fix: correct the path"):
        Corpus("wiki.jsonl.gz")
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "a.jsonl", ROWS).write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(SettingError, match="cannot be read as a hub data set"):
        list(Corpus(str(tmp_path / "folder")))


def test_the_share_grows_to_one_and_the_name_follows_the_contents(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "c.jsonl", [{"id": n, "contents": f"t\n{'x' * 100}"} for n in range(3000)])
    corpus = Corpus(str(file))
    shares: list[Any] = [corpus.share for _ in corpus]
    assert shares[0] == 0
    assert 0 < shares[1500] < shares[2500] <= 1
    assert corpus.share == 1
    write_jsonl(file, ROWS)
    assert Corpus(str(file)).name != corpus.name
    folder = Corpus(str(tmp_path)).name
    write_jsonl(tmp_path / "d.jsonl", ROWS)
    assert Corpus(str(tmp_path)).name != folder

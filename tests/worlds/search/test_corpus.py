"""Corpora: files and data sets as passages, and errors for invalid rows."""

import gzip
import json
from pathlib import Path

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
    assert "cannot be read as parquet" in refused("p.parquet", b"no parquet")
    assert "deep.jsonl:1 cannot be read as JSON: maximum recursion" in refused("deep.jsonl", b"[" * 200_000)
    assert "c.tsv is neither a .jsonl, .json, .csv or .parquet file nor" in refused("c.tsv", b"id\tcontents\n")
    assert "c.csv:2 does not have 2 cells" in refused("c.csv", b"id,contents\na\n")
    assert "a.json holds a dict, not a list of rows" in refused("a.json", b"{}")
    with pytest.raises(SettingError, match="is not a file, and cannot be read as a hub data set"):
        list(Corpus(str(tmp_path / "nothing")))
    with pytest.raises(SettingError, match=r"there is no file wiki\.jsonl\.gz; fix: correct the path"):
        Corpus("wiki.jsonl.gz")

"""A small corpus for search tests."""

import json
from collections.abc import Sequence
from pathlib import Path

from agentfactory.worlds.search.local_index import build_index
from agentfactory.worlds.search.passage import Passage

PLAYS = [
    Passage("h", '"Hamlet"\nA tragedy by William Shakespeare about a prince who hesitates.'),
    Passage("m", '"Macbeth"\nA tragedy by William Shakespeare about a Scottish general and his wife.'),
    Passage("f", '"Faust"\nA tragedy by Goethe about a scholar and a wager.', url="http://127.0.0.1/faust"),
    Passage("t", '"東京タワー"\n東京都港区にある電波塔。'),
    Passage("c", '"Café society"\nPeople of fashion who meet in cafés.'),
]


def index_of(folder: Path, passages: Sequence[Passage] = PLAYS) -> Path:
    build_index(passages, folder / "index")
    return folder / "index"


def write_jsonl(file: Path, rows: Sequence[object]) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file

"""Dataset files: formats, columns, order, and errors that name file and row."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.config import DataConfig
from agentfactory.rollout.data import TaskOrder, load_tasks
from agentfactory.rollout.data.notices import tell_shared_tasks
from agentfactory.rollout.data.nulls import Nulls, drop_from_call, drop_from_schema

ROWS = [{"question": f"q{i}", "answer": i} for i in range(5)]


def write(path: Path, text: str) -> DataConfig:
    path.write_text(text)
    return DataConfig(path=str(path))


def test_columns_and_limit(tmp_path: Path) -> None:
    config = write(tmp_path / "t.json", json.dumps([{"problem": "p", "x": 1}] * 3))
    config = config.model_copy(update={"columns": {"question": "problem"}, "limit": 2})
    assert load_tasks(config) == [{"question": "p", "x": 1}] * 2


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("[\n{]", {}, r"data\.path: .*t\.json:2 is not JSON: .* at column 2; fix: correct it"),
        ("[1]", {}, "row 1 .* is a int"),
        ('[{"question": "a"}, {"text": "b"}]', {}, "row 2 .* neither 'question' nor 'messages'.*text.*; fix: rename"),
        ('[{"question": "a"}, {"question": null}]', {}, "row 2 of .*: question is null, .*; fix: write the task there"),
        ('[{"messages": [{"from": "human", "value": "hi"}]}]', {}, r"messages\.0: got .*'from'.*, not {role: "),
        ('[{"question": "a"}]', {"answer": "solution"}, "data.columns.answer: row 1 .* no field 'solution'"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, columns: dict[str, str], message: str) -> None:
    config = write(tmp_path / "t.json", text).model_copy(update={"columns": columns})
    with pytest.raises(SettingError, match=message):
        load_tasks(config)


CALL = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": {}}}]}
CALLS = {**CALL, "tool_calls": [*CALL["tool_calls"], {"id": "b", "function": {"name": "look", "arguments": {}}}]}
HM = {"role": "assistant", "content": "Hm."}
USER, SEEN = {"role": "user", "content": "go"}, {"role": "tool", "content": "a wall"}


def seen(call: str) -> dict[str, str]:
    return {**SEEN, "tool_call_id": call}


def test_results_come_in_the_order_of_their_calls(tmp_path: Path) -> None:
    """As chat templates need that write no ids."""
    rest = [CALL, seen("a"), USER]
    messages = [USER, CALLS, seen("b"), seen("a"), *rest]
    (task,) = load_tasks(write(tmp_path / "t.json", json.dumps([{"messages": messages}])))
    results = [message["tool_call_id"] for message in task["messages"] if message["role"] == "tool"]
    assert results == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, CALL, USER], r"1 of the calls in messages\.1 have no result before messages\.2; add messages"),
        ([USER, CALLS, seen("b"), CALL], r"1 of the calls in messages\.1 have no result before messages\.3"),
        ([USER, CALL, seen("c"), USER], r"messages\.2\.tool_call_id: got 'c', but the calls without a result are 'a'"),
        ([USER, CALLS, seen("a"), seen("a")], r"messages\.3\.tool_call_id: got 'a', .* without a result are 'b'"),
        ([USER, CALL, seen("a"), seen("a")], r"messages\.3: it is the result of no call; remove it"),
        ([USER, CALL, {**seen("a"), "name": "go"}], r"messages\.2\.name: got 'go', but the call is of 'look'"),
        ([USER, {**HM, "weight": 10**400}], r"messages\.1\.weight: got 1000.*, not a number of at least 0"),
    ],
)
def test_calls_and_their_results_belong_together(tmp_path: Path, messages: list[Any], message: str) -> None:
    with pytest.raises(SettingError, match=f"row 1 of .*: {message}"):
        load_tasks(write(tmp_path / "t.json", json.dumps([{"messages": messages}])))


def test_conversations_that_are_whole(tmp_path: Path) -> None:
    malformed = {"role": "assistant", "content": "<tool_call>{"}
    whole = [[CALLS, seen("b"), seen("a"), USER], [CALLS, SEEN, SEEN, CALL], [CALL], [malformed, SEEN, CALL, seen("a")]]
    for messages in ([USER, *each] for each in whole):
        load_tasks(write(tmp_path / "t.json", json.dumps([{"messages": messages}])))
    told = {"role": "developer", "content": "Be brief."}
    (row,) = load_tasks(write(tmp_path / "t.json", json.dumps([{"messages": [told, USER]}])))
    assert row["messages"] == [{**told, "role": "system"}, USER]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("image", "red.png", r"its column 'image' is not read; data\.columns: {images: image}"),
        ("image", {"bytes": None, "path": "a/RED.JPG"}, "its column 'image' is not read"),
        ("video", ["a.mp4"], "its column 'video' is not read; models here see images only: remove it"),
        ("audio", {"array": [0.1], "sampling_rate": 8000}, "its column 'audio' is not read"),
    ],
)
def test_columns_of_media_that_are_not_read(tmp_path: Path, column: str, value: Any, message: str) -> None:
    with pytest.raises(SettingError, match=f"row 1 of .*: {message}"):
        load_tasks(write(tmp_path / "t.json", json.dumps([{"question": "What?", column: value}])))
    renamed = write(tmp_path / "t.json", json.dumps([{"question": "What?", column: value}]))
    (row,) = load_tasks(renamed.model_copy(update={"columns": {"clip": column}}))
    assert row["clip"] == value
    load_tasks(write(tmp_path / "t.json", json.dumps([{"question": "Which?", "image": "ubuntu:24.04", "audio": 3}])))


def test_parquet_is_read_without_a_copy_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"question": "a", "info": {"a": 0.3}, "parts": [{"b": 0.7}, "c", None], "place": {"x": 1.5}},
        {"question": "b", "info": {"a": "x"}, "parts": None, "place": {"x": 0.3}},
    ]
    whole = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    assert whole.to_list() != rows, "datasets itself now reads 0.3 exactly: use it"
    whole.to_parquet(tmp_path / "t.parquet")
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert load_tasks(DataConfig(path=str(tmp_path / "t.parquet"))) == rows
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: whole)
    assert load_tasks(DataConfig(path="someone/something")) == rows
    deep = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(["[" * 9000 + "]" * 9000]))
    pyarrow.parquet.write_table(pyarrow.table({"info": deep}), tmp_path / "deep.parquet")
    with pytest.raises(SettingError, match=r"deep\.parquet cannot be read as parquet"):
        load_tasks(DataConfig(path=str(tmp_path / "deep.parquet")))


def test_order_takes_every_task_once_an_epoch_and_depends_on_seed_and_position_alone() -> None:
    order = TaskOrder(ROWS, seed=3, shuffle=True)
    epochs = [[order[5 * e + i]["answer"] for i in range(5)] for e in range(4)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    fresh = TaskOrder(ROWS, seed=3, shuffle=True)
    assert fresh[12] == order[12]
    assert fresh[2] == order[2]
    other = TaskOrder(ROWS, seed=4, shuffle=True)
    assert [other[i] for i in range(20)] != [order[i] for i in range(20)]
    plain = TaskOrder(ROWS, seed=3, shuffle=False)
    assert [plain[i]["answer"] for i in range(7)] == [0, 1, 2, 3, 4, 0, 1]


def test_held_out_tasks_that_are_trained_on_are_told(caplog: pytest.LogCaptureFixture) -> None:
    training = [{"question": "a", "seed": 1}, {"question": "a", "seed": 2}]
    tell_shared_tasks(training, [{"question": "a", "seed": 3}, {"seed": 2, "question": "a"}], "eval.data")
    (record,) = caplog.records
    assert record.getMessage().startswith("eval.data: 1 of 2 rows are also training tasks, the first is row 2; use ")
    tell_shared_tasks(training, [{"question": "a", "seed": 3}], "eval.data")
    assert len(caplog.records) == 1


def test_nulls_of_columns_are_dropped_where_no_schema_allows_them() -> None:
    place = {"properties": {"x": {"type": ["integer", "null"]}}}
    fields = {
        "place": {"$ref": "#/$defs/Place"},
        "list": {"prefixItems": [{"properties": {"a": {}}}], "items": {"additionalProperties": False}},
        "any": {"anyOf": [{"properties": {"b": {"type": "null"}}}, {"type": "string"}]},
        **{"far": {"$ref": "other.json"}, "odd": {"$ref": "#/$defs/None"}},
    }
    schema = {"$defs": {"Place": place}, "properties": fields, "patternProperties": {"^n_": {"enum": [None, 1]}}}
    kept = {"place": {"x": None}, "list": [{"a": None}, {}], "any": {"b": None}, "far": {"z": None}, "odd": {"z": None}}
    given = {**kept, "place": {"x": None, "y": None}, "list": [{"a": None}, {"c": None}], "n_1": None, "none": None}
    nulls = Nulls()
    call = drop_from_call({"function": {"name": "f", "arguments": given}}, {"f": ToolSpec("f", "", schema)}, nulls)
    assert call == {"function": {"name": "f", "arguments": {**kept, "n_1": None}}}
    assert nulls == Nulls(dropped=3, allowed=6)
    declared = {"const": None, "type": ["string", "null"]}
    left = {"properties": {"b": declared}, "anyOf": [{}]}
    column = {
        "type": "object",
        "default": None,
        "properties": {"a": None, "b": {**declared, "title": None}},
        "anyOf": [{"items": None}],
    }
    assert drop_from_schema(column, nulls, columnar=True) == {"type": "object", **left}
    assert [drop_from_schema({"const": None}, nulls, columnar) for columnar in (False, True)] == [{"const": None}, {}]

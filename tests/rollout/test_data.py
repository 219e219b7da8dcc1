"""Dataset files: formats, columns, order, and errors that name file and row."""

import json
from pathlib import Path

import pytest

from rollout.config import DataConfig
from rollout.data import Place, TaskOrder, load_tasks, opening_messages

ROWS = [{"question": f"q{i}", "answer": i} for i in range(5)]


def write(path: Path, text: str) -> DataConfig:
    path.write_text(text)
    return DataConfig(path=str(path))


def test_json_jsonl_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    import datasets

    jsonl = write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, ROWS)))
    as_json = write(tmp_path / "t.json", json.dumps(ROWS))
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "t.parquet")
    parquet = DataConfig(path=str(tmp_path / "t.parquet"))
    assert load_tasks(jsonl) == load_tasks(as_json) == load_tasks(parquet) == ROWS


def test_columns_and_limit(tmp_path: Path) -> None:
    config = write(tmp_path / "t.json", json.dumps([{"problem": "p", "x": 1}] * 3))
    config = config.model_copy(update={"columns": {"question": "problem"}, "limit": 2})
    assert load_tasks(config) == [{"question": "p", "x": 1}] * 2


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("[]", {}, "holds no rows"),
        ("{}", {}, "must be a list"),
        ("[", {}, "is not JSON"),
        ("[1]", {}, "row 1 .* is a int"),
        ('[{"question": "a"}, {"text": "b"}]', {}, "row 2 .* neither 'question' nor 'messages'.*text"),
        ('[{"question": "a"}]', {"answer": "solution"}, "data.columns.answer: row 1 .* no field 'solution'"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, columns: dict[str, str], message: str) -> None:
    config = write(tmp_path / "t.json", text).model_copy(update={"columns": columns})
    with pytest.raises(ValueError, match=message):
        load_tasks(config)


def test_bad_line_of_jsonl_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t\.jsonl:2 is not JSON"):
        load_tasks(write(tmp_path / "t.jsonl", '{"question": "a"}\n{'))


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


def test_a_place_and_its_groups_id_say_the_same() -> None:
    for place in (Place(0), Place(12, 1), Place(1234567, 2)):
        assert Place.of(place.group_id) == place
    assert Place(12, 1).group_id == "g000012-1"
    for other in ("sampled-00012", "g12", "g000012-", "g000012.3"):
        with pytest.raises(ValueError, match=r"not the id of a group, such as g000012 or g000012-1"):
            Place.of(other)


def test_opening_messages() -> None:
    assert opening_messages({"question": "hi"}, None) == [{"role": "user", "content": "hi"}]
    row = {"messages": [{"role": "user", "content": "a"}]}
    assert opening_messages(row, "be brief") == [{"role": "system", "content": "be brief"}, *row["messages"]]

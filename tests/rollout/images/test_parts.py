"""Images in data rows, in the formats of TRL, verl and ms-swift."""

import json
from pathlib import Path

import pytest
from PIL import Image

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import text_of
from agentfactory.rollout.config import DataConfig
from agentfactory.rollout.data import load_tasks
from agentfactory.rollout.images.parts import clean_row, image_urls, place_images, show_in_user_turns
from agentfactory.tools.images.decode import decode

BASE = Path("/data")


def placed(row: dict) -> list[list[str]]:
    """The parts of each message of a row, images as <address>."""
    messages = place_images(clean_row(row, BASE), str)
    return [
        [part["text"] if part["type"] == "text" else f"<{part['image_url']['url']}>" for part in message["content"]]
        if isinstance(message["content"], list)
        else [message["content"]]
        for message in messages
    ]


def user(content: object) -> dict:
    return {"role": "user", "content": content}


ROWS = {
    "no marks": ({"question": "q", "images": ["a.png", "/b.png"]}, [["</data/a.png>", "</b.png>", "q"]]),
    "ms-swift and verl": (
        {"messages": [user("is <image> <image>?"), {"role": "assistant", "content": "<image>"}], "images": ["a", "b"]},
        [["is ", "</data/a>", " ", "</data/b>", "?"], ["<image>"]],
    ),
    "TRL": (
        {"messages": [user([{"type": "image", "text": None}, {"type": "text", "text": "q"}])], "images": ["a"]},
        [["</data/a>", "q"]],
    ),
    "OpenAI": (
        {"messages": [user([{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {"url": "data:x"}}])]},
        [["q", "<data:x>"]],
    ),
    "Qwen": ({"messages": [user([{"type": "image", "image": "file:///a.png"}])]}, [["</a.png>"]]),
    "one image": ({"question": "q", "images": "a"}, [["</data/a>", "q"]]),
    "a table's file": ({"question": "q", "images": [{"bytes": None, "path": "a"}]}, [["</data/a>", "q"]]),
    "later": (
        {"messages": [{"role": "system", "content": "s"}, user("q")], "images": ["a"]},
        [["s"], ["</data/a>", "q"]],
    ),
    "text about images": ({"question": "what is <image> in HTML?"}, [["what is <image> in HTML?"]]),
    "a row without any": ({"question": "q", "images": None}, [["q"]]),
}


@pytest.mark.parametrize("name", ROWS)
def test_images_stand_where_the_row_says(name):
    row, expected = ROWS[name]
    assert placed(row) == expected


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "<image> and <image>", "images": ["a"]}, "it has 1 images, but its text has place.* for 2"),
        ({"question": "<image>", "images": ["a", "b"]}, "it has 2 images, but its text has placeholders .* for 1"),
        ({"question": "<image>", "images": []}, "it has 0 images"),
        ({"messages": [user([{"type": "image"}])]}, "there is no column `images`"),
        ({"messages": [user([{"type": "video", "video": "a.mp4"}])]}, "has the type 'video'"),
    ],
)
def test_a_row_with_other_numbers_of_images_is_refused(tmp_path, row, problem):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "q"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(SettingError, match=rf"data.path: row 2 of .*{problem}"):
        load_tasks(DataConfig(path=str(file)))


def test_a_table_of_images_is_read(tmp_path):
    import datasets

    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    rows = [{"problem": "q", "pictures": [str(tmp_path / "red.png")]}]
    features = {"problem": datasets.Value("string"), "pictures": datasets.List(datasets.Image())}
    table = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    table.to_parquet(tmp_path / "rows.parquet")
    columns = {"question": "problem", "images": "pictures"}
    [task] = load_tasks(DataConfig(path=str(tmp_path / "rows.parquet"), columns=columns))
    [image] = task["images"]
    assert decode(image).size == (40, 30)


def test_images_of_tools_follow_in_a_user_turn_where_a_template_has_none():
    image = {"type": "image_url", "image_url": {"url": "image:a"}}
    tool = {"role": "tool", "content": [{"type": "text", "text": "seen"}, image]}
    shown = show_in_user_turns([user("q"), tool, {"role": "tool", "content": "none"}, {"role": "assistant"}, tool])
    assert [message["role"] for message in shown] == ["user", "tool", "tool", "user", "assistant", "tool", "user"]
    assert text_of(shown[1]["content"]) == "seen\n[image: see below]"
    assert shown[3]["content"] == [image] == shown[-1]["content"]
    assert image_urls(shown) == ["image:a"] * 2

"""Images that a run has stored, on a chain's page, with the boxes that tools were given."""

import json
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from agentfactory.base.messages import Message, ToolCall
from agentfactory.launching.run_folder import RunFolder
from agentfactory.rollout.images.store import ImageStore, url_of
from agentfactory.rollout.trajectory import Group
from tests.saved_groups import write_groups
from tests.viewer.browsing import asking, chain_page
from tests.viewer.viewer_runs import chain


def zoomed(run: RunFolder, box: list[float], number: int | None = None) -> list[Message]:
    store = ImageStore(run.images)
    seen, crop = (store.put(Image.new("RGB", *given)) for given in (((400, 200), "red"), ((64, 64), "blue")))
    store.path(crop).unlink()
    arguments = {"bbox_2d": box, **({} if number is None else {"img_idx": number})}
    call = ToolCall("call_0", "image_zoom_in_tool", arguments)

    def shown(digest: str) -> dict:
        return {"type": "image_url", "image_url": {"url": url_of(digest)}}

    return [
        {"role": "user", "content": [shown(seen), {"type": "text", "text": "What is there?"}]},
        {"role": "assistant", "content": "", "tool_calls": [call.to_openai()]},
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": [shown(crop)]},
    ]


def run_of(
    folder: Path, box: list[float], model_type: str = "qwen3_vl", number: int | None = None, coordinates: str = "auto"
) -> RunFolder:
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": model_type}))
    run = RunFolder.create(
        folder / "run", f"name: eyes\nmodel: {{path: {model}}}\nrollout: {{coordinates: {coordinates}}}\n"
    )
    messages = zoomed(run, box, number)
    write_groups(run.trajectories / "train.jsonl", [Group("g000000", {"question": "?"}, [chain("c", messages, [])])])
    return run


def test_a_stored_image_is_shown_and_a_missing_one_is_told(tmp_path: Path) -> None:
    _, client = asking(run_of(tmp_path, [0, 0, 500, 1000]).path)
    page = chain_page(client)
    first, crop = page["messages"][0]["parts"][0], page["messages"][2]["parts"][0]
    answer = client.get(f"/{first['image']}")
    # another run's image may come to stand at the same address
    assert (answer.headers["content-type"], answer.headers["cache-control"]) == ("image/png", "no-cache")
    assert client.get(f"/{first['image']}", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    assert Image.open(BytesIO(answer.content)).size == (400, 200)
    missing = client.get(f"/{crop['image']}")
    assert missing.status_code == 404
    assert "fix: keep the folder" in missing.json()["error"]


@pytest.mark.parametrize(
    ("model_type", "coordinates", "box", "number", "expected"),
    [
        ("qwen3_vl", "auto", [0, 250, 500, 1000], None, [[0.0, 0.25, 0.5, 1.0]]),
        ("qwen2_5_vl", "auto", [100, 50, 300, 150], 0, [[0.25, 0.25, 0.75, 0.75]]),
        ("qwen2_5_vl", "auto", [-100, 0, 4000, 100], 0, [[0.0, 0.0, 1.0, 0.5]]),
        # as the recipe says
        ("qwen3_vl", "resized", [100, 50, 300, 150], None, [[0.25, 0.25, 0.75, 0.75]]),
        # nothing of the image, no such image, no box
        ("qwen3_vl", "auto", [500, 0, 500, 10], None, []),
        ("qwen3_vl", "auto", [0, 0, 500, 500], 5, []),
        ("qwen3_vl", "auto", [0, 0, "a", 500], None, []),
    ],
)
def test_boxes_are_where_the_model_meant_them(tmp_path, model_type, coordinates, box, number, expected) -> None:
    page = chain_page(asking(run_of(tmp_path, box, model_type, number, coordinates).path)[1])
    assert page["messages"][0]["parts"][0]["boxes"] == expected
    assert page["messages"][2]["parts"][0]["boxes"] == []

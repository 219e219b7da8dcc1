"""Coordinates in the text of rows are rewritten to the model's convention."""

from typing import Any

import pytest
from PIL import Image

from agentfactory.base.errors import SettingError
from agentfactory.rollout.images.task_images import state_places
from agentfactory.rollout.trajectory import Outcome
from agentfactory.tools.images.coordinates import Coordinates, ModelView, SizeRule
from tests.seeing_chains import seeing
from tests.vision_models import KINDS, make_vision_model

IMAGES = [Image.new("RGB", (400, 300)), Image.new("RGB", (1000, 500))]
ROW = {
    "question": "Is <bbox> larger than <bbox>?",
    "images": IMAGES,
    "objects": {"ref": [], "bbox": [[100, 150, 200, 225], [250, 400]], "image_id": [0, 1]},
}
RULE = SizeRule(28, 4 * 28 * 28, 10**7)
"""400 x 300 pixels become 392 x 308, and 1000 x 500 become 1008 x 504."""


def said(row: dict[str, Any], coordinates: str = "relative1000") -> Any:
    return state_places(row, ModelView(Coordinates(coordinates), RULE), "MODEL", "data", 3)


@pytest.mark.parametrize(
    ("coordinates", "box", "point"),
    [
        ("pixels", "[100, 150, 200, 225]", "[250, 400]"),
        ("relative1000", "[250, 500, 500, 750]", "[250, 800]"),
        ("relative1", "[0.25, 0.5, 0.5, 0.75]", "[0.25, 0.8]"),
        # 392 / 400 and 308 / 300 of the first, 1008 / 1000 and 504 / 500 of the second
        ("resized", "[98, 154, 196, 231]", "[252, 403]"),
    ],
)
def test_a_place_is_stated_as_the_model_does(coordinates: str, box: str, point: str) -> None:
    assert said(ROW, coordinates)["question"] == f"Is {box} larger than {point}?"
    shares = {"bbox": [[0.25, 0.5, 0.5, 0.75], [0.25, 0.8]], "bbox_type": "norm1", "image_id": [0, 1]}
    assert said({**ROW, "objects": shares}, coordinates)["question"] == f"Is {box} larger than {point}?"
    parts = [{"type": "text", "text": "Is <bbox>"}, {"type": "image"}, {"type": "text", "text": "at <bbox>?"}]
    conversation = [{"role": "user", "content": parts}, {"role": "assistant", "content": "No, at <bbox>."}]
    row = {**ROW, "messages": conversation, "objects": {"bbox": [[100, 150, 200, 225]] * 3, "image_id": None}}
    stated = said(row, coordinates)["messages"]
    assert [part.get("text") for part in stated[0]["content"]] == [f"Is {box}", None, f"at {box}?"]
    assert stated[1]["content"] == f"No, at {box}."
    assert row["messages"][1]["content"] == "No, at <bbox>."  # the row itself is not changed


def test_a_text_without_places_stays() -> None:
    for row in ({"question": "the tag <bbox>"}, {"question": "?", "objects": ["box"]}, {**ROW, "question": "?"}):
        assert said(row) is row


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"question": "<bbox>"}, "objects.bbox has 2 places, but its text has <bbox> 1 times"),
        ({"objects": {"bbox": [[1, 2], [1, 2, 3]]}}, r"objects.bbox has \[1, 2, 3\]; use \[left"),
        ({"objects": {"bbox": [[1, 2], [9, 2, 3, 4]]}}, r"has \[9, 2, 3, 4\]: left must be less than right"),
        ({"objects": {"bbox": [[1, 2], [1, 2]], "image_id": [0, 2]}}, "has 2, but the row has 2 images, numbered from"),
        ({"objects": {"bbox": [[1, 2], [1, 2]], "bbox_type": "norm1000"}}, "objects.bbox_type is 'norm1000'; use real"),
        ({"objects": {"bbox": [[1, 2], [1, 2]], "image_id": [0]}}, "has 1 numbers, but objects.bbox has 2 places"),
    ],
)
def test_what_is_no_place_is_told(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingError, match=rf"data: row 3: .*{problem}"):
        said({**ROW, **change})


@pytest.mark.parametrize("kind", KINDS)
async def test_the_model_of_a_chain_reads_them(kind: str, tmp_path) -> None:
    model = str(make_vision_model(tmp_path / "model", kind))
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "yes"

    # neither model resizes an image of 224 x 224 pixels
    row = {"images": [Image.new("RGB", (224, 224))], "objects": {"bbox": [[56, 112, 168, 224]]}}
    async with seeing(model, tmp_path, answer) as chains:
        chain = await chains.run(question="What is at <bbox>?", **row)
        with pytest.raises(SettingError, match=r"data: row 1: objects\.bbox has 1 places"):
            await chains.runner.check([{"question": "<bbox> and <bbox>", **row}])
    assert chain.outcome is Outcome.COMPLETED, chain.error
    box = {"qwen2_5_vl": "[56, 112, 168, 224]", "qwen3_vl": "[250, 500, 750, 1000]"}[kind]
    assert f"What is at {box}?" in prompts[0]

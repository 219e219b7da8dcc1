"""Sizes, tokens and positions of images, compared with transformers."""

import json
import random

import httpx
import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from agentfactory.base.errors import SettingError
from agentfactory.rollout.config import ModelConfig
from agentfactory.rollout.images.families import load_vision, view_of_model, why_no_images
from agentfactory.rollout.images.features import PixelMaker
from agentfactory.rollout.images.image_tokens import PatchVision
from agentfactory.tools.images.coordinates import SizeRule
from tests.vision_models import KINDS, make_vision_model
from tests.vision_rows import picture


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    return str(make_vision_model(tmp_path_factory.mktemp("vision") / request.param, request.param))


def vision_of(model: str, **limits: int) -> PatchVision:
    return load_vision(model, **limits)


def test_images_get_the_size_that_transformers_gives_them(model):
    draw = random.Random(0)
    vision = vision_of(model)
    factor = vision.patch_size * vision.merge_size
    twice = 0

    def theirs(width: int, height: int) -> tuple[int, int]:
        return smart_resize(height, width, factor, vision.min_pixels, vision.max_pixels)[::-1]

    for _ in range(20_000):
        width, height = (int(10 ** draw.uniform(0, 4)) for _ in range(2))
        try:
            expected = theirs(width, height)
            # transformers may leave a narrow image too large, and then resize it again in a second pass
            while theirs(*expected) != expected:
                twice += 1
                expected = theirs(*expected)
        except ValueError:
            with pytest.raises(ValueError, match="at most 200 times"):
                vision.sizes.fitted(width, height)
        else:
            assert vision.sizes.fitted(width, height) == expected
    assert twice


def test_how_a_model_of_the_hub_sees_is_read_from_what_was_downloaded(model, tmp_path, monkeypatch):
    """Tools are tried without a model, and each request to an unreachable hub would take half a minute."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(httpx.Client, "send", lambda *args, **more: pytest.fail("the hub was asked"))
    config = ModelConfig(path="org/eyes")
    with pytest.raises(FileNotFoundError, match=r"fix: hf download org/eyes config\.json preprocessor_config\.json"):
        view_of_model(config, "auto")
    (tmp_path / "models--org--eyes" / "snapshots").mkdir(parents=True)
    (tmp_path / "models--org--eyes" / "snapshots" / "main").symlink_to(model)
    stated = view_of_model(config, "auto")
    assert stated == view_of_model(ModelConfig(path=model), "auto")
    assert stated is not None
    with pytest.raises(FileNotFoundError, match="the folder /nowhere/model does not exist yet"):
        view_of_model(ModelConfig(path="/nowhere/model"), "auto")


def test_an_omni_model_is_not_called_a_text_model(tmp_path):
    for config, reason in (
        ({"model_type": "qwen2_5_omni", "thinker_config": {"vision_config": {}}}, "is of the family qwen2_5_omni"),
        ({"model_type": "gemma3", "vision_config": {}}, "attend to each other in both directions"),
        ({"model_type": "qwen3", "text_config": {}}, "accepts only text"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert reason in why_no_images(str(tmp_path))


def test_limits_that_no_size_keeps_are_told():
    """The rule alternately enlarges and shrinks the image."""
    with pytest.raises(ValueError, match=r"from 3072 to 4096 pixels in whole tokens"):
        SizeRule(32, 3072, 4096).fitted(200, 100)
    width, height = SizeRule(32, 3072, 2 * 3072).fitted(200, 100)
    assert 3072 <= width * height <= 2 * 3072


@pytest.mark.parametrize("size", [(5, 990), (990, 5), (20, 700), (64, 64), (301, 200), (1, 1), (3000, 2000)])
def test_the_processor_leaves_an_image_as_it_was_resized(model, size):
    vision = vision_of(model)
    fitted = vision.fit(picture(0, *size))
    made = PixelMaker(model, vision).make(fitted)
    pixels, grids = made["pixel_values"], made["image_grid_thw"]
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    again = processor(images=[fitted], return_tensors="pt")
    assert torch.equal(again["pixel_values"], pixels)
    assert tuple(grids[0].tolist()) == vision.grid(fitted)
    assert len(pixels) == vision.tokens(vision.grid(fitted)) * vision.merge_size**2
    # and resizes the original to the same
    theirs = processor(images=[picture(0, *size)], return_tensors="pt")
    assert torch.equal(theirs["image_grid_thw"], grids)
    torch.testing.assert_close(theirs["pixel_values"], pixels, atol=2.1 / 127, rtol=0)


def row_with_images(vision: PatchVision, sizes: list[tuple[int, int]]):
    ids, images = [20, 21], []
    for number, size in enumerate(sizes):
        ids += [30 + number, vision.image_token_id, 40]
        images.append((f"{number:032x}", vision.grid(vision.fit(picture(0, *size)))))
    return [*ids, 22, 23, 24], images


def test_images_are_expanded_and_collapsed(model):
    vision = vision_of(model)
    ids, images = row_with_images(vision, [(60, 60), (200, 100), (90, 300)])
    row, spans = vision.expand(ids, images)
    assert [(span.digest, span.grid) for span in spans] == images
    for span in spans:
        assert row[span.offset : span.offset + span.length] == [vision.image_token_id] * span.length
        assert row[span.offset + span.length] == 40
    assert vision.collapse(row, spans) == ids
    with pytest.raises(ValueError, match="placeholders for 3 images, but there are 2"):
        vision.expand(ids, images[:2])


def test_positions_are_those_of_transformers(model):
    vision = vision_of(model)
    network = AutoModelForImageTextToText.from_pretrained(model)
    for sizes in ([], [(60, 60)], [(200, 100), (90, 300)], [(64, 64), (64, 64), (5, 990)]):
        row, spans = vision.expand(*row_with_images(vision, sizes))
        ids = torch.tensor([row])
        expected, _ = network.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == vision.image_token_id).int(),
            image_grid_thw=torch.tensor([span.grid for span in spans]) if spans else None,
        )
        assert torch.equal(torch.from_numpy(vision.positions(len(row), spans)), expected[:, 0])
        # a row that ends earlier has the same positions, also within an image
        for length in range(len(row)):
            within = [span for span in spans if span.offset < length]
            assert np.array_equal(vision.positions(length, within), expected[:, 0, :length].numpy())


def test_limits_of_pixels_replace_the_processors(model):
    small = vision_of(model, max_pixels=vision_of(model).min_pixels)
    assert small.tokens(small.grid(small.fit(picture(0, 500, 500)))) == 4
    with pytest.raises(SettingError, match="max_image_pixels"):
        vision_of(model, min_pixels=10_000, max_pixels=5_000)

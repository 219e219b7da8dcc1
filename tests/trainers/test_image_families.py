"""Multimodal model families: trees, packed and padded lines give the results of single rows, and of transformers with
its own processor."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

from agentfactory.base.errors import SettingError
from agentfactory.rollout.images.families import load_vision
from agentfactory.rollout.images.image_tokens import OwnProcessor
from agentfactory.trainers.batches.batch import make_batches, training_row
from agentfactory.trainers.networks.policy import load_policy
from agentfactory.trainers.networks.vision_tower import check_images, tower_of
from tests.trainers.float64 import never_through_float32
from tests.trainers.test_images import computed, learner_of, recipe_of, rows_of
from tests.vision_families import FAMILIES, OWN, make_family, params_of
from tests.vision_rows import Album

pytestmark = pytest.mark.numbers


@pytest.fixture(scope="module", params=params_of(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("family") / request.param, request.param)


@pytest.fixture(scope="module", params=params_of(OWN))
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("own") / request.param, request.param)


@pytest.fixture(autouse=True)
def whole_float64() -> Iterator[None]:
    with never_through_float32():
        yield


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_every_layout_equals_single_rows(model: Path, tmp_path: Path, vision: str) -> None:
    album = Album(model, tmp_path / "images")
    learner = learner_of(recipe_of(model, vision=vision), album)
    assert learner.batching == "tree"
    rows = rows_of(album)
    expected = computed(learner, make_batches(rows, "padded", 1, vision=learner.vision)[0])
    tower = tower_of(learner.policy.network)
    assert any(weight.grad is not None for weight in tower.parameters()) == (vision == "trained")
    for batching, budget in (("tree", 10_000), ("packed", 10_000), ("padded", 10_000)):
        (batch,) = make_batches(rows, batching, budget, vision=learner.vision)
        for given, wanted in zip(computed(learner, batch), expected, strict=True):
            # GLM's tower interpolates its positions in float32
            torch.testing.assert_close(given, wanted, atol=1e-7 if model.name == "glm4v" else 1e-12, rtol=1e-12)
    # regardless of a process without images
    images = learner.images.blank(torch.device("cpu"))
    assert len(images.counts) == 1
    learner.policy.hidden(torch.zeros(1, 4, dtype=torch.int64), images=images).sum().backward()


def test_rows_equal_transformers_own_processor_and_forward(own: Path, tmp_path: Path) -> None:
    """Compare text with images through the model's processor and forward pass, and the row through a tree, with
    gradients."""
    album = Album(own, tmp_path / "images")
    vision = album.vision
    learner = learner_of(recipe_of(own, vision="trained"), album)
    shown = [album.image(60, 60, 1), album.image(150, 90, 2), album.image(40, 200, 3)]
    processor, mark = vision.processor, vision.processor.image_token
    text = f"user What is{mark}shown?\n\n{mark} tool {mark}\n"
    images = [album.store.load(digest) for digest, _ in shown]
    theirs = processor(text=[text], images=images, return_tensors="pt")
    row = album.row()
    row.append_context(*vision.expand(processor.tokenizer(text)["input_ids"], shown))
    assert row.token_ids == theirs.pop("input_ids")[0].tolist()
    assert vision.collapse(row.token_ids, row.images) == processor.tokenizer(text)["input_ids"]
    theirs.pop("attention_mask")
    turn = album.text(6)
    row.append_sampled(turn, [-1.0] * 6, [])
    (batch,) = make_batches([training_row(row, 0.5)], "tree", 10_000, vision=learner.vision)
    _, logprobs, gradients = computed(learner, batch)
    network = AutoModelForImageTextToText.from_pretrained(own, dtype=torch.float64)
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in theirs.items()}
    ids = torch.tensor([row.token_ids])
    logits = network(input_ids=ids, use_cache=False, **inputs).logits[0, -7:-1]
    logits[:, list(vision.banned_token_ids)] -= 100.0
    expected = (logits / 0.7).log_softmax(-1).gather(-1, torch.tensor(turn)[:, None])[:, 0]
    torch.testing.assert_close(logprobs[0], expected, atol=1e-7, rtol=1e-7)
    (-0.5 * expected + 0.1 * expected * expected).sum().div(batch.normaliser).backward()
    for name, weight in network.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(gradients[f"model.{name}"], weight.grad, atol=1e-6, rtol=1e-6)


def test_the_start_compares_with_transformers(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(recipe_of(own))
    check_images(policy, str(own))
    expansion = OwnProcessor._expansion
    monkeypatch.setattr(OwnProcessor, "_expansion", lambda self, grid: expansion(self, grid)[:-1])
    with pytest.raises(SettingError, match=r"tokenizes a row with two images to .* tokens, and rows here would have"):
        check_images(policy, str(own))
    monkeypatch.undo()
    process = OwnProcessor.process
    monkeypatch.setattr(
        OwnProcessor, "process", lambda self, image: process(self, Image.eval(image, lambda value: 255 - value))
    )
    with pytest.raises(SettingError, match=r"from .*'s own processor and forward pass by \d"):
        check_images(policy, str(own))


def test_glm_has_transformers_sizes_and_positions(tmp_path: Path) -> None:
    path = make_family(tmp_path / "glm4v", "glm4v")
    vision = load_vision(str(path))
    draw = np.random.default_rng(0)
    for _ in range(5_000):
        width, height = (int(side) for side in 10 ** draw.uniform(0, 4, 2))

        def theirs(width: int, height: int) -> tuple[int, int]:
            return smart_resize(2, height, width, 2, 28, 2 * vision.min_pixels, 2 * vision.max_pixels)[::-1]

        try:
            expected = theirs(width, height)
            while (again := theirs(*expected)) != expected:
                expected = again
        except ValueError:
            with pytest.raises(ValueError, match="at most 200 times"):
                vision.check(width, height)
        else:
            assert vision.sizes.fitted(width, height) == expected
    network = AutoModelForImageTextToText.from_pretrained(path)
    grids = [(1, 4, 6), (1, 2, 8)]
    ids = [20, vision.image_token_id, 21, 22, vision.image_token_id, 23]
    row, spans = vision.expand(ids, [(str(number), grid) for number, grid in enumerate(grids)])
    tokens = torch.tensor([row])
    expected, _ = network.model.get_rope_index(
        tokens, (tokens == vision.image_token_id).int(), image_grid_thw=torch.tensor(grids)
    )
    assert torch.equal(torch.from_numpy(vision.positions(len(row), spans)), expected[:, 0])

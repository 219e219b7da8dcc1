"""Multimodal model families: trees, packed and padded lines give the results of single rows, and of transformers with
its own processor."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

from agentfactory.base.errors import SettingError
from agentfactory.rollout.images.families import load_vision
from agentfactory.rollout.images.features import PixelMaker, compute_features, encoder_outputs, join
from agentfactory.rollout.images.image_tokens import OwnProcessor
from agentfactory.trainers.batches.batch import Batch, MicroBatch, TrainingRow, make_batches, training_row
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.networks.vision_tower import check_images, tower_of
from agentfactory.trainers.update.learner import Learner, Terms
from tests.saved_checkpoint import save_checkpoint
from tests.trainers.float64 import in_float64, never_through_float32
from tests.trainers.scored import fill_adapters
from tests.vision_families import FAMILIES, OWN, make_family, params_of
from tests.vision_models import KINDS, make_vision_model
from tests.vision_rows import Album

pytestmark = pytest.mark.numbers


@pytest.fixture(scope="module", params=params_of(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("family") / request.param, request.param)


@pytest.fixture(scope="module", params=params_of(OWN))
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("own") / request.param, request.param)


@pytest.fixture(autouse=True)
def whole_float64() -> Iterator[None]:
    with never_through_float32():
        yield


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_every_layout_equals_single_rows_in_every_family(family: Path, tmp_path: Path, vision: str) -> None:
    album = Album(family, tmp_path / "images")
    learner = learner_of(recipe_of(family, vision=vision), album)
    assert learner.batching == "tree"
    rows = rows_of(album)
    expected = computed(learner, make_batches(rows, "padded", 1, vision=learner.vision)[0])
    tower = tower_of(learner.policy.network)
    assert any(weight.grad is not None for weight in tower.parameters()) == (vision == "trained")
    for batching, budget in (("tree", 10_000), ("packed", 10_000), ("padded", 10_000)):
        (batch,) = make_batches(rows, batching, budget, vision=learner.vision)
        for given, wanted in zip(computed(learner, batch), expected, strict=True):
            # GLM's tower interpolates its positions in float32
            torch.testing.assert_close(given, wanted, atol=1e-7 if family.name == "glm4v" else 1e-12, rtol=1e-12)
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


@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
@torch.no_grad()
def test_images_of_several_tiles_stay_apart(kind: str) -> None:
    """Without a processor, which needs torchvision. transformers 5.24 returns the images of a row as one tensor."""
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**size, "model_type": "llama", "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
    tower = {**size, "image_size": 32, "patch_size": 8}
    own = {"image_token_id": 60, "scale_factor": 2, "pad_token_id": 0}
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=tower, **own)
    network = AutoModelForImageTextToText.from_config(config).eval()
    mask = torch.ones(1, 2, 32, 32, dtype=torch.bool)
    images = [{"pixel_values": torch.rand(1, n, 3, 32, 32), "pixel_attention_mask": mask[:, :n]} for n in (1, 2)]
    features = compute_features(network, join(images), [4, 8])
    assert [len(image.tokens) for image in features] == [4, 8]
    ids = torch.tensor([[5, *[60] * 12, 6]])
    given = network.base_model(ids, **encoder_outputs(network, features)).last_hidden_state
    torch.testing.assert_close(given, network.base_model(ids, **join(images)).last_hidden_state)


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


# ---- the families of Qwen, whose processors need no torchvision


EXACT = {"atol": 1e-12, "rtol": 1e-12}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / request.param, request.param)


@pytest.fixture
def album(model: Path, tmp_path: Path) -> Album:
    return Album(model, tmp_path / "images")


def recipe_of(model: Path, lora: dict[str, Any] | None = None, **train: Any) -> TrainRecipe:
    return TrainRecipe.model_validate(
        {"model": {"path": str(model), "dtype": "float32", "lora": lora}, "train": {"steps": 1, **train}}
    )


def learner_of(recipe: TrainRecipe, album: Album) -> Learner:
    learner = Learner(recipe, Accelerator(cpu=True), temperature=0.7, images=album.store.folder)
    in_float64(learner.model)
    return learner


def rows_of(album: Album) -> list[TrainingRow]:
    """Return rows of a task with an image in its prompt and a crop in each chain (crops of one size, so with the same
    ids); a branch within a branch; a shared prefix that ends with an image, one that begins with one; chains without
    images."""
    seen, other = album.image(120, 90, 1), album.image(120, 90, 2)
    crops = [album.image(64, 64, 10 + number) for number in range(4)]
    prompt, turn, after = album.text(9), album.text(5), album.text(3)
    rows = [album.row(prompt, seen, turn, 4, after, crop, 3) for crop in crops[:2]]
    nested = album.row(prompt, seen, turn, 4, after, crops[2], 3, after)
    more = [album.row(4, after, crop, 2) for crop in (crops[0], crops[3])]
    for end in more:
        begun, ids = copy.deepcopy(nested), len(nested.token_ids)
        begun.token_ids += end.token_ids
        begun.mask += end.mask
        begun.logprobs += end.logprobs
        begun.images += [replace(span, offset=span.offset + ids) for span in end.images]
        rows.append(begun)
    # the same ids with other images: they differ from the first token on
    rows += [album.row(image, turn, 3) for image in (seen, other, seen)]
    rows += [album.row(prompt, image, 2) for image in (seen, other)]
    rows += [album.row(prompt, turn, 3), album.row(prompt, turn, 2), album.row(prompt, crops[0], crops[0], crops[1], 2)]
    return [training_row(row, advantage=album.draw.uniform(-1, 1)) for row in rows]


def loss(index: int, part: Any, logprob: Tensor, entropy: Tensor) -> Terms:
    streams = part.streams
    return Terms((streams["weight"] * (-streams["advantage"] * logprob + 0.1 * logprob * logprob)).sum())


def computed(learner: Learner, batch: Batch) -> tuple[Tensor, dict[int, Tensor], dict[str, Tensor]]:
    """Return the loss, log-probabilities by row, and gradients by name of a whole batch."""
    total, rows = torch.zeros((), dtype=torch.float64), {}
    learner.model.zero_grad()
    for index, part in enumerate(batch.micro_batches):
        logprob, entropy = policy_pass(learner, part)
        value = loss(index, part, logprob, entropy).loss / batch.normaliser
        value.backward()
        total += value.detach()
        for place, row in enumerate(part.rows):
            rows[row] = logprob.detach()[part.sequence == place]
    gradients = {name: weight.grad for name, weight in learner.policy.named_parameters() if weight.grad is not None}
    return total, rows, {name: gradient.clone() for name, gradient in gradients.items()}


def policy_pass(learner: Learner, part: MicroBatch) -> tuple[Tensor, ...]:
    return learner.policy_forward(*learner._inputs(part), learner.temperature, learner.entropy_gradient)


def assert_same(given: Any, expected: Any) -> None:
    torch.testing.assert_close(given, expected, **EXACT)


@contextmanager
def counting(learner: Learner) -> Iterator[list[int]]:
    """Count the images in each run of the tower."""
    tower = tower_of(learner.policy.network)
    runs: list[int] = []
    handle = tower.register_forward_hook(
        lambda module, args, kwargs, output: runs.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    yield runs
    handle.remove()


CHECKPOINTING = {"lora": {"rank": 2}, "gradient_checkpointing": True}


@pytest.mark.parametrize("variant", [{"vision": "trained"}, pytest.param(CHECKPOINTING, marks=pytest.mark.extended)])
def test_every_layout_equals_single_rows(model: Path, album: Album, variant: dict[str, Any]) -> None:
    recipe = recipe_of(model, **variant)
    learner = learner_of(recipe, album)
    alone = learner_of(recipe_of(model, **{**variant, "gradient_checkpointing": False}), album)
    if recipe.model.lora:
        fill_adapters(learner.policy, 0.1, torch.Generator().manual_seed(1))
        alone.model.load_state_dict(learner.model.state_dict())
    rows = rows_of(album)
    expected = computed(alone, make_batches(rows, "padded", 1, vision=alone.vision)[0])
    names = set(expected[2])
    assert any(".visual." in name for name in names) == ("vision" in variant)
    for batching, budget in (("tree", 10_000), ("tree", 150), ("packed", 10_000), ("packed", 150), ("padded", 10_000)):
        (batch,) = make_batches(rows, batching, budget, vision=learner.vision)
        with counting(learner) as runs:
            total, logprobs, gradients = computed(learner, batch)
        assert_same(total, expected[0])
        assert_same(logprobs, expected[1])
        assert_same(gradients, expected[2])
        # each image once per micro-batch
        digests = [{image.digest for image in part.images} for part in batch.micro_batches]
        assert runs == [len(images) for images in digests if images]
        if (batching, budget) == ("tree", 10_000):
            assert sum(part.ids.numel() for part in batch.micro_batches) < 0.7 * sum(len(row.token_ids) for row in rows)


def test_equals_transformers_own_forward(model: Path, album: Album) -> None:
    learner = learner_of(recipe_of(model), album)
    # transformers treats two images without a token between them as one
    rows = rows_of(album)[:-1]
    (batch,) = make_batches(rows, "tree", 10_000, vision=learner.vision)
    _, logprobs, _ = computed(learner, batch)
    network = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64)
    maker = PixelMaker(str(model), album.vision)
    for number, row in enumerate(rows):
        ids = torch.as_tensor(row.token_ids)[None]
        pictures: dict[str, Any] = {}
        if row.images:
            pictures = join([maker.make(album.store.load(image.digest)) for image in row.images])
            pictures["pixel_values"] = pictures["pixel_values"].double()
        kinds = (ids == album.vision.image_token_id).int()
        logits = network(ids, mm_token_type_ids=kinds, **pictures).logits[0]
        logits[:, list(album.vision.banned_token_ids)] -= 100.0
        expected = (logits / 0.7).log_softmax(-1)[torch.as_tensor(row.targets) - 1]
        labels = ids[0, torch.as_tensor(row.targets)]
        torch.testing.assert_close(logprobs[number], expected.gather(-1, labels[:, None])[:, 0], atol=1e-7, rtol=1e-7)


def test_critic_and_reference_see_images(model: Path, album: Album) -> None:
    """Score of a critic that has learned, and of a reference, in trees and alone."""
    recipe = recipe_of(model, algorithm="ppo", loss={"kl": {"coefficient": 0.1}}, token_budget=10_000)
    learner = learner_of(recipe, album)
    in_float64(learner._reference.network)
    with torch.no_grad():
        learner._actor_critic.critic.head.normal_()
        learner.policy.network.lm_head.weight.mul_(1.1)
    rows = rows_of(album)
    found = learner.score(rows, ["proximal", "reference", "value"])
    learner.batching, learner.token_budget = "padded", 1
    expected = learner.score(rows, ["proximal", "reference", "value"])
    for given, wanted in zip(found, expected, strict=True):
        for name in ("proximal", "reference", "value"):
            # scores are stored in float32
            torch.testing.assert_close(given.streams[name], wanted.streams[name], atol=2e-6, rtol=2e-6)
        assert not torch.allclose(*(torch.as_tensor(given.streams[name]) for name in ("proximal", "reference")))


def test_rows_that_cannot_be_seen_are_refused(model: Path, album: Album) -> None:
    rows = [training_row(album.row(album.image(80, 80, 5), 3))]
    learner = learner_of(recipe_of(model), album)
    (image,) = rows[0].images
    other = album.image(200, 90, 6)[0]
    for images, problem in (
        ((replace(image, digest="0" * 32),), "cannot be read"),
        ((replace(image, digest=other),), "which do not match"),
    ):
        (batch,) = make_batches([replace(rows[0], images=images)], "tree", 100, vision=learner.vision)
        with pytest.raises(ValueError, match=problem):
            policy_pass(learner, batch.micro_batches[0])


def test_a_checkpoint_is_a_model_that_sees(model: Path, album: Album, tmp_path: Path) -> None:
    learner = Learner(recipe_of(model, vision="trained"), Accelerator(cpu=True), images=album.store.folder)
    with torch.no_grad():
        for weight in learner.policy.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    folder = save_checkpoint(tmp_path, 1, learner, AutoTokenizer.from_pretrained(model), {})
    (batch,) = make_batches(rows_of(album), "tree", 10_000, vision=learner.vision)
    again = Learner(recipe_of(folder), Accelerator(cpu=True), images=album.store.folder)
    with torch.no_grad():
        for part in batch.micro_batches:
            assert_same(policy_pass(again, part)[0], policy_pass(learner, part)[0])


def test_the_tower_has_its_own_learning_rate(model: Path) -> None:
    learner = Learner(recipe_of(model, vision=1e-6, learning_rate=1e-4), Accelerator(cpu=True))
    rates = {id(weight): group["lr"] for group in learner.optimizer.param_groups for weight in group["params"]}
    for name, weight in learner.policy.named_parameters():
        assert rates[id(weight)] == (1e-6 if ".visual." in name else 1e-4)
    frozen = Learner(recipe_of(model), Accelerator(cpu=True)).optimizer.param_groups
    assert sum(len(group["params"]) for group in frozen) == sum(".visual." not in n for n in learner.policy.gather())


def adapted(policy: Policy) -> set[str]:
    """Return the parts of the network, and of its layers, that have an adapter."""
    return {f"{name.split('.')[3]} {name.split('.')[-3]}" for name in policy.gather()}


LANGUAGE = {f"language_model {name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}


def test_adapters_are_in_the_language_model(model: Path) -> None:
    assert adapted(load_policy(recipe_of(model, lora={"rank": 2}))) == LANGUAGE
    everywhere = adapted(load_policy(recipe_of(model, lora={"rank": 2}, vision="trained")))
    assert everywhere > LANGUAGE
    assert any(name.startswith("visual") for name in everywhere)
    names = ["q_proj", "gate_proj", "linear_fc1"]
    with pytest.raises(SettingError, match=r"model.visual.*use all-linear, or the pattern") as refused:
        load_policy(recipe_of(model, lora={"rank": 2, "target_modules": names}))
    pattern = str(refused.value).rpartition("pattern ")[2].strip("'").replace("\\\\", "\\")
    found = adapted(load_policy(recipe_of(model, lora={"rank": 2, "target_modules": pattern})))
    assert found == {"language_model q_proj", "language_model gate_proj"}

"""Images in the embedded engine: same numbers as transformers' forward pass, whatever the cache held before."""

import asyncio
import base64
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from agentfactory.rollout.images import features
from agentfactory.rollout.images.families import load_vision
from agentfactory.rollout.inference.embedded import engine as engine_module
from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.rollout.inference.embedded.image_encoder import ImageCache, load_encoder
from agentfactory.rollout.inference.embedded.packed_linear import quantize
from agentfactory.rollout.inference.embedded.sampling import HeldImage, Request, UnsupportedModel
from agentfactory.rollout.inference.http_server import BadRequest
from agentfactory.tools.images.lru_cache import ByteCache
from tests.engine_runs import finish, make_adapter
from tests.vision_families import make_family
from tests.vision_models import KINDS, make_vision_model
from tests.vision_rows import file_of, picture

pytestmark = pytest.mark.numbers


@pytest.fixture(scope="module", params=[*KINDS, "glm4v"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = make_vision_model if request.param in KINDS else make_family
    return make(tmp_path_factory.mktemp("vision") / request.param, request.param)


def load(model: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()


def make_engine(model: Path, **options: Any) -> Engine:
    network = load(model)
    sizes = {"max_model_len": 600, "max_num_seqs": 6, **options}
    return Engine(network, encoder=load_encoder(str(model), network), **sizes)


def started(model: Path, **options: Any) -> tuple[Engine, Any, int]:
    """An engine, another network of its model, and the image token."""
    engine = make_engine(model, **options)
    return engine, load(model), engine.encoder.images.vision.image_token_id


def hold(engine: Engine, *images: Image.Image) -> list[HeldImage]:
    held = engine.encoder.images
    return [held.hold(held.vision.fit(image)) for image in images]


def text(seed: int, length: int = 12) -> list[int]:
    return np.random.default_rng(seed).integers(20, 300, length).tolist()


def make_request(engine: Engine, ids: list[int], held: list[HeldImage], seed: int = 0, **options: Any) -> Request:
    images = engine.encoder.images
    prompt, placed = images.place(ids, held)
    bias = dict.fromkeys(images.vision.banned_token_ids, -100.0)
    options = {"max_tokens": 8, "generator": random.Random(seed), "logit_bias": bias, **options}
    return Request(prompt, on_finish=lambda request: None, images=placed, **options)


@torch.no_grad()
def expected(network: Any, engine: Engine, request: Request) -> torch.Tensor:
    """The log-probabilities of the request's tokens by the network's own forward pass, from pixels."""
    ids = torch.tensor([[*request.token_ids, *request.tokens]])
    seen: dict[str, Any] = {}
    if request.images:
        seen = engine.encoder.pixels(request.images.held)
        kinds = torch.zeros_like(ids)
        kinds[0, : len(request.prompt)] = torch.from_numpy(request.prompt < 0)
        seen["mm_token_type_ids"] = kinds.int()
    logits = network(input_ids=ids, **seen).logits[0, len(request.prompt) - 1 : -1]
    for token, bias in request.logit_bias.items():
        logits[:, token] += bias
    logprobs = torch.log_softmax(logits / (request.temperature or 1), -1)
    return logprobs.gather(1, ids[0, len(request.prompt) :, None])[:, 0]


def check(network: Any, engine: Engine, *requests: Request) -> None:
    for request in requests:
        assert request.finish_reason == "length"
        torch.testing.assert_close(
            torch.tensor(request.logprobs), expected(network, engine, request), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("static", [False, True])
def test_two_turns_with_two_images_each(model: Path, static: bool) -> None:
    engine, network, pad = started(model, static_decode=static)
    first, second = hold(engine, picture(1), picture(2, 60, 300)), hold(engine, picture(3, 300, 80), picture(1))
    ids = [*text(1), pad, *text(2, 3), pad, *text(3)]
    turn = make_request(engine, ids, first, temperature=0.7)
    finish(engine, turn)
    check(network, engine, turn)
    # the second turn repeats one image of the first
    ids += [*turn.tokens, *text(4), pad, 30, pad, *text(5, 2)]
    known = engine.cached_tokens
    turns = [make_request(engine, ids, first + second, seed) for seed in range(3)]
    finish(engine, *turns)
    check(network, engine, *turns)
    assert engine.cached_tokens - known > len(turn.prompt) + 2 * len(turns[0].prompt)
    assert len({tuple(turn.tokens) for turn in turns}) > 1


@pytest.mark.parametrize("chunk", [7, pytest.param(16, marks=pytest.mark.extended)])
@pytest.mark.parametrize("static", [False, True])
def test_prompts_with_and_without_images_come_in_chunks_that_cut_images(
    model: Path, chunk: int, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, network, pad = started(model, static_decode=static)
    monkeypatch.setitem(engine_module.PREFILL_TOKENS, "cpu", chunk)
    a, b, c = hold(engine, picture(1), picture(2, 300, 300), picture(3))
    requests = [
        make_request(engine, text(1, 40), []),
        make_request(engine, [*text(2), pad, *text(3), pad, *text(4)], [a, b], max_tokens=30),
        make_request(engine, [pad, *text(5)], [c], max_tokens=20),
        make_request(engine, [*text(6, 5), pad, 31, pad, 30], [b, b]),
        # ends with an image
        make_request(engine, [*text(7, 5), pad], [a]),
        make_request(engine, text(8, 3), [], max_tokens=40),
        make_request(engine, [*text(9, 30), pad, *text(10)], [b]),
    ]
    finish(engine, *requests)
    check(network, engine, *requests)
    # only its last token is not cached
    again = make_request(engine, [*text(7, 5), pad], [a])
    finish(engine, again)
    check(network, engine, again)


def test_equal_ids_with_different_images_share_nothing_but_what_precedes_them(model: Path) -> None:
    engine, network, pad = started(model)
    ids = [*text(1), pad, *text(2)]
    requests = [make_request(engine, ids, [image]) for image in hold(engine, *map(picture, range(4)))]
    assert all(request.token_ids == requests[0].token_ids for request in requests)
    for request in requests:
        before = engine.cached_tokens
        finish(engine, request)
        check(network, engine, request)
        assert engine.cached_tokens - before in (0, 12)
    assert len({request.logprobs[0] for request in requests}) == 4
    # the same image again comes from the cache
    again = make_request(engine, ids, hold(engine, picture(2)))
    before = engine.computed_tokens
    finish(engine, again)
    check(network, engine, again)
    assert engine.computed_tokens == before


def test_a_sampled_image_token_is_no_image(model: Path) -> None:
    """Next to a prompt with an image, and in a recomputed chunk of its own prompt's cache."""
    engine, network, pad = started(model)
    vision = engine.encoder.images.vision
    [held] = hold(engine, picture(1))
    forced = make_request(engine, [*text(1), pad, *text(2)], [held], max_tokens=9, logit_bias={pad: 100.0})
    forced.candidates = [40, 50]
    engine.add(forced)
    for _ in range(4):
        engine.step()
    assert forced.tokens == [pad] * 4
    engine.reset_prefix_cache(reset_running_requests=True)
    other = make_request(engine, [*text(3), pad], hold(engine, picture(2)))
    finish(engine, other)
    check(network, engine, other)
    assert forced.tokens == [pad] * 9
    # the network would treat a sampled image token as an image, so the reference is computed from embeddings
    ids = torch.tensor([[*forced.token_ids, *forced.tokens]])
    embedded = network.get_input_embeddings()(ids)
    seen = engine.encoder.pixels(forced.images.held)
    image = features.compute_features(network, seen, [held.tokens for held in forced.images.held])[0]
    places = torch.zeros_like(ids, dtype=torch.bool)
    places[0, : len(forced.prompt)] = torch.from_numpy(forced.prompt < 0)
    embedded[places] = image.tokens
    positions = vision.positions(ids.shape[1], forced.images.spans)
    deep = {"visual_pos_masks": places, "deepstack_visual_embeds": list(image.deep)} if image.deep else {}
    with torch.no_grad():
        states = network.model.language_model(
            inputs_embeds=embedded, position_ids=torch.from_numpy(positions)[:, None], **deep
        )[0]
        logits = network.lm_head(states)[0, len(forced.prompt) - 1 : -1]
    logits[:, pad] += 100.0
    wanted = torch.log_softmax(logits, -1)[:, [40, 50]]
    torch.testing.assert_close(torch.tensor(forced.candidate_logprobs), wanted, atol=1e-4, rtol=0)


def count_images(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of images of each run of the tower."""
    counts: list[int] = []
    compute: Callable[..., Any] = features.compute_features

    def counted(network: Any, inputs: Any, tokens: Any) -> Any:
        counts.append(len(tokens))
        return compute(network, inputs, tokens)

    monkeypatch.setattr("agentfactory.rollout.inference.embedded.image_encoder.compute_features", counted)
    return counts


def test_an_image_is_computed_once_until_it_is_forgotten(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, pad = started(model)
    counts = count_images(monkeypatch)
    a, b = hold(engine, picture(1), picture(2))
    for seed in range(3):
        finish(engine, *[make_request(engine, [*text(seed + k), pad, pad, 5], [a, b], seed) for k in (0, 10)])
    assert counts == [2]
    engine.reset_prefix_cache()
    finish(engine, make_request(engine, [*text(0), pad, 5], [a]))
    assert counts == [2]
    engine.reset_encoder_cache()
    finish(engine, make_request(engine, [*text(90), pad, 5], [b]))
    assert counts == [2, 1]


def test_caches_are_bounded_and_what_is_gone_is_computed_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, network, pad = started(model)
    encoder, counts = engine.encoder, count_images(monkeypatch)
    encoder._features = ByteCache(limit=40_000)
    images = hold(engine, *map(picture, range(12)))
    for number, image in enumerate(images):
        finish(engine, make_request(engine, [*text(number), pad, 5], [image]))
    assert 1 < len(encoder._features) < 12
    assert encoder._features.nbytes <= 40_000
    engine.reset_prefix_cache()
    again = [make_request(engine, [*text(20), pad, 5], [images[number]]) for number in (0, 11)]
    finish(engine, *again)
    check(network, engine, *again)
    assert sum(counts) == 13  # the first was dropped


def image_cache(model: Path, **options: Any) -> ImageCache:
    vision = load_vision(str(model))
    return ImageCache(vision, **options)


def part(image: Image.Image, uuid: str | None = None) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(file_of(image)).decode()
    return {"type": "image_url", "url": url, "uuid": uuid}


async def test_images_are_held_by_uuid_up_to_a_number_of_bytes(model: Path) -> None:
    images = image_cache(model, limit=200_000)
    [first] = await images.receive([part(picture(0), "0")])
    # the same uuid is the same image, whatever comes with it; so are equal pixels without one
    assert await images.receive([part(picture(1), "0"), {"type": "image_url", "url": None, "uuid": "0"}]) == [first] * 2
    one, two = await asyncio.gather(*[images.receive([part(picture(5))]) for _ in range(2)])
    assert one == two != [first]
    last = [(await images.receive([part(picture(seed), str(seed))]))[0] for seed in range(20)]
    assert images._held.nbytes <= 200_000
    named = {"type": "image_url", "url": None}
    assert await images.receive([{**named, "uuid": "19"}]) == [last[19]]
    with pytest.raises(ValueError, match="Cache miss for image at index 0 but data is not provided"):
        await images.receive([{**named, "uuid": "0"}])
    # no two images share ids
    ids = [i for image in {first, *one, *last} for i in range(image.first_id, image.first_id - image.tokens, -1)]
    assert len(ids) == len(set(ids))
    assert max(ids) < 0


async def test_parts_that_cannot_be_used(model: Path, tmp_path: Path) -> None:
    images = image_cache(model)
    stored = tmp_path / "image.png"
    picture(0).save(stored)
    image = {"type": "image_url", "url": "data:image/png;base64,AAAA"}
    cases: list[tuple[Any, str]] = [
        ("x", r"content_parts\[0\]: only"),
        ({**image, "type": "video_url"}, "only"),
        ({**image, "uuid": 5}, "uuid: 5 is not"),
        ({**image, "url": None}, "Cache miss for image at index 0"),
        *(({**image, "url": url}, "must be a data: URL") for url in ("https://example.org/a.png", str(stored))),
        ({**image, "url": "data:image/png;base64,!"}, "is not base64"),
        (image, "cannot be decoded"),
    ]
    for content_part, problem in cases:
        with pytest.raises(ValueError, match=problem):
            await images.receive([content_part])
    with pytest.raises(ValueError, match="must be a list"):
        await images.receive("x")
    with pytest.raises(ValueError, match="at most 200 times the other"):
        await images.receive([part(Image.new("RGB", (1, 300)))])
    pad = images.vision.image_token_id
    held = await images.receive([part(picture(0))])
    for ids in ([20, 30], [20, pad, 30, pad]):
        with pytest.raises(ValueError, match=r"placeholders for [02] images, but there are 1"):
            images.place(ids, held)


def test_what_was_used_last_is_kept() -> None:
    cache: ByteCache[str, int] = ByteCache(limit=10)
    for number, name in enumerate("abc"):
        cache.put(name, number, 4)
    assert (cache.get("a"), cache.get("b"), cache.nbytes) == (None, 1, 8)
    cache.put("d", 3, 4)
    assert (cache.get("b"), cache.get("c"), cache.get("d")) == (1, None, 3)
    cache.put("huge", 4, 100)
    assert (len(cache), cache.get("huge"), cache.nbytes) == (1, 4, 100)
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_running_requests_are_computed_again_with_their_images(model: Path) -> None:
    engine, network, pad = started(model)
    request = make_request(engine, [*text(1), pad, *text(2)], hold(engine, picture(1)), max_tokens=12)
    engine.add(request)
    for _ in range(5):
        engine.step()
    assert len(request.tokens) == 5
    engine.sleep()
    engine.wake(weights=True, cache=True)
    finish(engine)
    check(network, engine, request)


def test_adapters_on_language_layers_and_none_on_the_tower(model: Path, tmp_path: Path) -> None:
    engine, _, pad = started(model)
    for name, target in {"language": r".*language_model.*\.(q_proj|v_proj|up_proj)", "tower": "all-linear"}.items():
        make_adapter(load(model), tmp_path / name, 0, 0.1, target_modules=target)
    adapter = engine.adapters.load("language", str(tmp_path / "language"))
    adapted = peft.PeftModel.from_pretrained(load(model), tmp_path / "language").eval()
    ids, held = [*text(1), pad, *text(2)], hold(engine, picture(1))
    plain, with_adapter = make_request(engine, ids, held), make_request(engine, ids, held, adapter=adapter)
    finish(engine, plain, with_adapter)
    check(load(model), engine, plain)
    check(adapted, engine, with_adapter)
    with pytest.raises(BadRequest, match=r"visual.*language model's layers, and on head and embedding of text models"):
        engine.adapters.load("tower", str(tmp_path / "tower"))


def test_rounding_leaves_the_tower_as_it_is(model: Path) -> None:
    plain, rounded = load(model).state_dict(), load(model)
    quantize(rounded, "int8")
    changed = {name for name, weight in rounded.state_dict().items() if not torch.equal(weight, plain[name])}
    linear = {name for name, weight in plain.items() if name.endswith("_proj.weight") and weight.ndim > 1}
    assert changed == {name for name in linear if "language_model" in name}


def test_the_proof_at_start_sees_wrong_positions(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(self: Any, length: int, spans: Any) -> np.ndarray:
        return np.repeat(np.arange(length)[None], 3, 0)

    monkeypatch.setattr("agentfactory.rollout.images.image_tokens.PatchVision.positions", flat)
    with pytest.raises(UnsupportedModel, match="after an image differ by"):
        make_engine(model)


def test_a_cache_without_room_for_an_image_is_refused(model: Path) -> None:
    with pytest.raises(UnsupportedModel, match="too small for an image"):
        make_engine(model, max_model_len=24)

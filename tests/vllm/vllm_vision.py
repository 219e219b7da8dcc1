"""Chains with images on real vLLM, and on the embedded engine (test_server_contract.py): the server's log-probabilities
are transformers' own, and it is sent what the rows hold."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from agentfactory.base.messages import Message, ToolCall, ToolResult
from agentfactory.rollout.chains.sampling import Sampler, Sampling
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.images.features import PixelMaker, join
from agentfactory.rollout.images.image_intake import ShownImages
from agentfactory.rollout.images.image_tokens import BANNED_BIAS
from agentfactory.rollout.inference.inference_client import GENERATE, InferenceClient
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.token_row import Row
from tests.server_process import VLLM_PYTHON, serve
from tests.vision_families import FAMILIES, OWN, make_family, params_of
from tests.vision_models import KINDS, make_vision_model
from tests.vision_rows import file_of, picture

SAMPLING = Sampling("policy", 0.7, "c0")
TOKENS = 40


class Served(NamedTuple):
    recipe: RolloutRecipe
    url: str
    renderer: Renderer
    images: ShownImages
    network: Any


@contextmanager
def serving(kind: str, folder: Path, server: dict[str, Any], limit: int | None = None) -> Iterator[Served]:
    path = (make_vision_model if kind in KINDS else make_family)(folder / kind, kind)
    sections: dict[str, Any] = {
        "model": {"path": str(path), "dtype": "float32", "max_image_pixels": limit},
        "server": {"max_model_len": 2048, "max_num_seqs": 8, **server},
        "limits": {"images": 8},
    }
    recipe = RolloutRecipe.model_validate(sections)
    renderer = load_renderer(recipe.model, "hermes", tools=False, images=folder / "images")
    likely = load_file(path / "model.safetensors")
    head = next(name for name in likely if name.endswith("lm_head.weight"))
    for token in renderer.images.vision.banned_token_ids:
        # where the bias did not hold, every second token would be one of these
        likely[head][token] *= 20
    save_file(likely, path / "model.safetensors", {"format": "pt"})
    network = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    with serve(sections, folder) as url:
        yield Served(recipe, url, renderer, renderer.images, network)


@pytest.fixture(
    scope="module",
    params=["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.long), *params_of(FAMILIES, pytest.mark.long)],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    args = ["--enforce-eager", "--enable-prefix-caching", "--served-model-name", "policy"]
    server = {"engine": "vllm", "options": {"python": VLLM_PYTHON, "args": args}}
    # more than the model's own processor allows, if it leaves sizes to us
    limit = None if request.param in OWN else 100 * (32 if request.param == "qwen3_vl" else 28) ** 2
    with serving(request.param, tmp_path_factory.mktemp("vllm-vision"), server, limit) as served:
        yield served


@torch.no_grad()
def logprobs_of(served: Served, row: Row) -> torch.Tensor:
    """The log-probability of each token of a row but the first, by transformers."""
    images = [served.images.store.load(span.digest) for span in row.images]
    ids = torch.tensor([row.token_ids])
    shown: dict[str, Any] = {}
    if images:
        maker = PixelMaker(served.recipe.model.path, served.images.vision)
        shown = join([maker.make(image) for image in images])
        if "image_grid_thw" in shown:
            assert [tuple(grid) for grid in shown["image_grid_thw"].tolist()] == [span.grid for span in row.images]
            shown["mm_token_type_ids"] = (ids == served.images.vision.image_token_id).int()
    if hasattr(served.network.model, "rope_deltas"):
        served.network.model.rope_deltas = None
    logits = served.network(input_ids=ids, use_cache=False, **shown).logits[0, :-1]
    logits[:, list(served.images.vision.banned_token_ids)] += BANNED_BIAS
    return (logits / SAMPLING.temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def check_logprobs(served: Served, row: Row) -> None:
    expected, found = logprobs_of(served, row), torch.tensor(row.logprobs)[1:]
    sampled = torch.tensor(row.mask, dtype=torch.bool)[1:]
    assert sampled.sum() > 2
    torch.testing.assert_close(found[sampled], expected[sampled], atol=1e-4, rtol=0)


def extend(served: Served, row: Row, messages: list[Message], new: list[Message]) -> None:
    collapsed = served.images.collapse(row)
    renderer = served.renderer
    added = renderer.extend(collapsed, messages, new, []) if row.token_ids else renderer.open(messages, [])
    row.append_context(*served.images.expand(added, new))


async def sample(served: Served, client: InferenceClient, row: Row, turn: int) -> None:
    sampler = Sampler(served.recipe, client, served.renderer.stop_token_ids, served.images)
    done = await sampler.sample(row.token_ids, SAMPLING, turn, TOKENS, images=row.images)
    assert not set(done.token_ids) & set(served.images.vision.banned_token_ids)
    row.append_sampled(done.token_ids, done.logprobs, done.versions)


async def take(served: Served, images: list[Any], text: str = "What is shown?") -> list[Message]:
    task = await served.images.take_task({"question": text, "images": images}, "data")
    return task["messages"]


async def test_two_turns_with_two_images_each(served: Served, tmp_path: Path) -> None:
    clear = picture(0, 300, 200).convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    turned = Image.Exif()
    turned[0x0112] = 6
    first = [file_of(clear), file_of(picture(1, 260, 130), "JPEG", exif=turned.tobytes())]
    second = [picture(2, 5, 990), picture(3, 1400, 1000)]
    async with InferenceClient(served.url) as client:
        for _ in range(2):  # the second time, the prefixes are cached
            messages = await take(served, first)
            row = Row()
            extend(served, row, messages, messages)
            await sample(served, client, row, 0)
            answer = await take(served, second, "And <image> beside <image>?")
            messages = [*messages, {"role": "assistant", "content": "words"}, *answer]
            extend(served, row, messages, answer)
            await sample(served, client, row, 1)
            assert len(row.images) == 4
            if served.recipe.model.max_image_pixels:
                assert row.images[3].length > 64, "the server keeps to model.max_image_pixels"
            check_logprobs(served, row)


@pytest.mark.parametrize("size", [(20, 700), (700, 20), (1, 1), (60, 60)])
async def test_images_of_any_size_are_read_as_the_row_has_them(served: Served, size: tuple[int, int]) -> None:
    async with InferenceClient(served.url) as client:
        messages = await take(served, [picture(4, *size)])
        row = Row()
        extend(served, row, messages, messages)
        await sample(served, client, row, 0)
        check_logprobs(served, row)


async def test_images_it_does_not_know_are_sent_again(served: Served) -> None:
    async with InferenceClient(served.url) as client:
        messages = await take(served, [picture(50, 128, 128), picture(51, 128, 96)])
        row = Row()
        extend(served, row, messages, messages)
        client._sent_to(served.url, None).note(row.images)
        await sample(served, client, row, 0)
        check_logprobs(served, row)
        parts = [{"type": "image_url", "url": None, "uuid": span.digest} for span in row.images]
        status, answer = await ask(served, client, served.images.collapse(row), parts)
    assert (status, answer["prompt_token_ids"]) == (200, row.token_ids)
    if served.images.vision.sizes is not None:
        places = [(place["offset"], place["length"]) for place in answer["mm_placeholders"]["image"]]
        assert places == [(span.offset, span.length) for span in row.images]


async def ask(served: Served, client: InferenceClient, ids: list[int], parts: list[Any]) -> tuple[int, Any]:
    """Send a request by hand, and return the status and the answer."""
    body = {"token_ids": ids, "content_parts": parts, "return_token_ids": True, "model": "policy"}
    body["sampling_params"] = {"max_tokens": 1}
    status, text, _ = await client.connection.request("POST", served.url + GENERATE, json.dumps(body).encode())
    return status, json.loads(text)


async def test_images_that_cannot_be_used_are_refused(served: Served) -> None:
    async with InferenceClient(served.url) as client:
        for url in (None, "data:image/png;base64,iVBORw0KGgo="):
            part = {"type": "image_url", "url": url, "uuid": "unknown"}
            status, answer = await ask(served, client, [20, served.images.vision.image_token_id, 30], [part])
            assert (status, url is None) == (400, "Cache miss" in str(answer))


async def test_images_of_tools_are_read(served: Served) -> None:
    [crop] = await take(served, [picture(6, 90, 60)], "a crop")
    result = ToolResult(crop["content"])
    call = ToolCall("call_0", "zoom", {})
    async with InferenceClient(served.url) as client:
        messages = await take(served, [picture(5, 64, 64)])
        row = Row()
        extend(served, row, messages, messages)
        await sample(served, client, row, 0)
        answers = served.renderer.dialogue.answers([call], [result])
        said = {"role": "assistant", "content": "", "tool_calls": [call.to_openai()]}
        extend(served, row, [*messages, said, *answers], answers)
        await sample(served, client, row, 1)
        check_logprobs(served, row)

"""Chains with images from the task and from tools, against a server that expands image tokens as vLLM does."""

import json
import os
import random
from base64 import b64encode

import numpy as np
import pytest
from aiohttp import web
from PIL import Image
from transformers import Qwen3Config

from agentfactory.base.errors import SettingError
from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.images import image_intake
from agentfactory.rollout.images.families import load_vision, view_of
from agentfactory.rollout.images.parts import image_urls
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.token_row import ImageSpan
from agentfactory.rollout.trajectory import Outcome, StopReason
from agentfactory.tools.images.coordinates import Coordinates
from agentfactory.tools.sessions.toolset import open_toolset
from tests.scripted_chains import call
from tests.seeing_chains import seeing
from tests.seeing_server import SeeingServer
from tests.vision_models import KINDS, make_vision_model, vision_template
from tests.vision_rows import file_of


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory) -> str:
    return str(make_vision_model(tmp_path_factory.mktemp("seeing") / request.param, request.param))


def look(width: int, height: int, seed: int = 0, count: int = 1) -> str:
    return call("look", width=width, height=height, seed=seed, count=count)


def picture(seed: int, size: tuple[int, int] = (90, 60), mode: str = "RGB") -> Image.Image:
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (7, 9, 3), dtype=np.uint8))
    return small.resize(size).convert(mode)


async def test_images_of_the_task_and_of_tools_are_seen_where_they_stand(model, tmp_path):
    async with seeing(model, tmp_path, [look(200, 100, count=2), look(64, 64, 1), "done"]) as chains:
        image = picture(0, (300, 200))
        chain = await chains.run(images=[image], question="What is <image> here, and <|image_pad|>?")
        chains.check(chain)
    assert chain.outcome is Outcome.COMPLETED
    assert [len(row.images) for row in chain.rows] == [4]
    [row] = chain.rows
    assert [m["role"] for m in chain.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    kinds = [[part["type"] for part in chain.messages[i]["content"]] for i in (0, 2, 4)]
    assert kinds == [["text", *["image_url"] * count, "text"] for count in (1, 2, 1)]
    shown = image_urls(chain.messages)
    assert shown == [f"image:{span.digest}" for span in row.images]
    # each is sent once
    [server] = chains.servers
    assert sorted(server.sent) == sorted(span.digest for span in row.images)
    # user and tool content is text, never control tokens
    text = chains.renderer.tokenizer.decode(chains.renderer.images.collapse(row))
    assert text.count("<|image_pad|>") == 4 + 1 + 2


async def test_a_reward_gets_the_images_of_the_chain(model, tmp_path):
    async with seeing(model, tmp_path, [look(200, 100), "done"], rewards=["looking.py:widths"]) as chains:
        task = await chains.runner.take({"question": "?", "images": [picture(0, (300, 200))]})
        chain = await chains.runner.run("c0", task, Sampling("policy", 1.0, seed="c0"))
        fit = chains.renderer.images.vision.sizes.fitted
    assert chain.error is None
    # the task's image in full size, and all images in the model's size
    widths = [300, fit(300, 200)[0], fit(200, 100)[0]]
    assert chain.metrics["widths"] == sum(width * 1000**place for place, width in enumerate(widths))


async def test_more_images_than_a_row_can_hold_end_the_chain(model, tmp_path):
    texts = [look(200, 200, count=50), "done"]
    async with seeing(model, tmp_path, texts, rollout={"max_total_tokens": 2000}) as chains:
        chain = await chains.run()
        chains.check(chain)
    assert chain.outcome is Outcome.CONTEXT_OVERFLOW
    assert len(image_urls(chain.messages)) == 50
    # nothing was sampled after them
    assert chain.rows[0].images[0].offset > chain.rows[0].turn_ends[-1]


@pytest.mark.extended
async def test_two_hundred_random_chains_are_sent_as_they_stand_in_the_rows(model, tmp_path):
    draw = random.Random(0)

    def text(_: str) -> str:
        if draw.random() < 0.4:
            return "done"
        if draw.random() < 0.1:
            return '<tool_call>\n{"name": "broken", "arguments": {}}\n</tool_call>'
        sides = [int(10 ** draw.uniform(0.5, 2.6)) for _ in range(2)]
        return look(*sides, seed=draw.randrange(5), count=draw.randrange(3))

    rollout = {"max_turns": 6, "max_total_tokens": 4096, "context": {"keep_images": 4}}
    async with seeing(model, tmp_path, text, rollout=rollout) as chains:
        ran = []
        for number in range(200):
            images = [picture(draw.randrange(9)) for _ in range(draw.randrange(3))]
            ran.append(await chains.run(f"c{number}", images=images))
        chains.check(*ran)
        assert not any(chain.outcome.failed for chain in ran), {chain.error for chain in ran}
    assert sum(len(row.images) for chain in ran for row in chain.rows) > 300
    assert any(len(chain.rows) > 1 for chain in ran)


async def test_an_image_that_cannot_be_shown_is_told(model, tmp_path):
    broken = '<tool_call>\n{"name": "broken", "arguments": {}}\n</tool_call>'
    async with seeing(model, tmp_path, [broken, look(4, 900), "done"]) as chains:
        chain = await chains.run()
        chains.check(chain)
    assert "image not shown: the image is damaged" in str(chain.messages[2]["content"])
    assert "at most 200 times the other" in str(chain.messages[4]["content"])
    assert not chain.rows[0].images


async def test_memory_of_images_is_bounded(model, tmp_path, monkeypatch):
    monkeypatch.setattr(image_intake, "_REMEMBERED", 4)
    monkeypatch.setattr(image_intake, "_SENT", 4)
    sent = image_intake.SentImages()
    async with seeing(model, tmp_path, ["done"]) as chains:
        images = chains.renderer.images
        for number in [*range(5), 1, 5]:
            await chains.runner.take({"question": "q", "images": [file_of(picture(number))]})
            sent.note([ImageSpan(0, 4, str(number), (1, 2, 2))])
        assert len(images._taken) == 4
        assert images.grid.cache_info().maxsize == 4
    assert [str(number) in sent for number in range(6)] == [False, True, False, True, True, True]
    sent.forget([ImageSpan(0, 4, "5", (1, 2, 2))])
    assert "5" not in sent


class Forgetful(SeeingServer):
    """A server that forgets all images after each request."""

    async def generate(self, request: web.Request) -> web.Response:
        answer = await super().generate(request)
        if answer.status == 200:
            self.images.clear()
        return answer


async def test_a_server_that_has_forgotten_images_gets_them_again(model, tmp_path):
    async with seeing(model, tmp_path, [look(80, 80), "done"], kind=Forgetful) as chains:
        chain = await chains.run(images=[picture(1)])
        chains.check(chain)
    first, second = chain.rows[0].images
    assert chains.servers[0].sent == [first.digest, first.digest, second.digest]


async def test_each_server_gets_the_images(model, tmp_path):
    async with seeing(model, tmp_path, ["done"] * 8, servers=2) as chains:
        ran = [await chains.run(f"c{n}", images=[picture(1)], question=f"go {n}") for n in range(8)]
        chains.check(*ran)
    assert all(len(server.sent) == 1 for server in chains.servers)


class Resizing(SeeingServer):
    """A server that expands images to another number of tokens."""

    def with_prompt(self, answer: web.Response, expanded: list[int]) -> web.Response:
        return super().with_prompt(answer, [*expanded, self.vision.image_token_id])


async def test_a_server_that_reads_other_ids_fails_the_chain(model, tmp_path):
    async with seeing(model, tmp_path, ["done"], kind=Resizing) as chains:
        chain = await chains.run(images=[picture(1)])
    assert chain.outcome is Outcome.INFERENCE_ERROR
    assert "resizes images differently" in chain.error


async def test_a_sampled_image_token_fails_the_chain(model, tmp_path):
    async with seeing(model, tmp_path, ["what <|image_pad|> is"]) as chains:
        chain = await chains.run(images=[picture(1)])
    assert chain.outcome is Outcome.INFERENCE_ERROR
    assert "the server sampled the image token" in chain.error


@pytest.mark.parametrize("policy", ["truncate", "summarize"])
async def test_context_policies_leave_out_images_as_whole_turns(model, tmp_path, policy):
    texts = [*(look(200, 200, n) for n in range(4)), "a summary", "done", "done"]
    rollout = {"context": {"policy": policy, "keep_turns": 1}, "max_turns": 9, "max_total_tokens": 1534}
    async with seeing(model, tmp_path, texts, rollout=rollout) as chains:
        chain = await chains.run(images=[picture(1)])
        chains.check(chain)
    assert not chain.outcome.failed
    assert len(chain.rows) > 1
    assert all(row.images[0].digest == chain.rows[0].images[0].digest for row in chain.rows), "the task's stays"
    assert len(chain.rows[-1].images) < 5


async def test_old_images_are_left_out_with_their_turns(model, tmp_path):
    texts = [*(look(80, 80, n) for n in range(4)), "done"]
    async with seeing(model, tmp_path, texts, rollout={"context": {"keep_images": 3}, "max_turns": 9}) as chains:
        chain = await chains.run(images=[picture(1)])
        chains.check(chain)
    task, *crops = (url.removeprefix("image:") for url in image_urls(chain.messages))
    assert [[i.digest for i in row.images] for row in chain.rows] == [[task, *crops[n : n + 2]] for n in range(3)]


async def test_images_are_limited(model, tmp_path):
    limits = {"images": 2, "on_breach": {"images": {"action": "stop"}}}
    async with seeing(model, tmp_path, [look(80, 80), look(80, 80, 1, 2), "done"], limits=limits) as chains:
        chain = await chains.run(images=[picture(1)])
        with pytest.raises(SettingError, match=r"row 2 has 3 images, but limits.images=2"):
            await chains.runner.check([{"question": "a"}, {"question": "b", "images": [picture(0)] * 3}])
    assert (chain.outcome, chain.stop_reason) == (Outcome.TOOL_LIMIT, StopReason.IMAGES)
    assert "Image not shown: the limit of 2 images" in str(chain.messages[-1]["content"])


async def test_tasks_with_images_are_small_and_usable(model, tmp_path):
    image = picture(3, (500, 400))
    path = tmp_path / "picture.png"
    image.save(path)
    async with seeing(model, tmp_path, ["done"] * 3) as chains:
        forms = [image, file_of(image), {"bytes": file_of(image), "path": None}, b64encode(file_of(image)).decode()]
        forms.append(str(path))
        tasks = [await chains.runner.take({"question": "q", "images": [form]}) for form in forms]
        os.mkfifo(tmp_path / "pipe.png")
        for name, reason in (("none.png", "No such file"), ("pipe.png", "is a FIFO")):
            with pytest.raises(SettingError, match=rf"data: row 1: .* cannot be read: {reason}"):
                await chains.runner.check([{"question": "q", "images": [str(tmp_path / name)]}])
    assert all(len(json.dumps(task)) < 1000 for task in tasks)
    assert len({task["messages"][0]["content"][0]["image_url"]["url"] for task in tasks}) == 1
    for task in tasks:
        assert np.array_equal(np.asarray(Image.open(task["images"][0])), np.asarray(image))


async def test_a_damaged_body_of_an_image_is_told_with_its_row_before_and_during_a_run(model, tmp_path, monkeypatch):
    whole = file_of(picture(3, (500, 400)))
    cut = tmp_path / "cut.png"
    cut.write_bytes(whole[: len(whole) // 2])
    tasks = [{"question": "q", "images": [whole]}, {"question": "q", "images": [whole, str(cut)]}]
    told = f"data: row 2: the image {cut} cannot be decoded: "
    async with seeing(model, tmp_path, ["done"]) as chains:
        with pytest.raises(SettingError, match=told):
            await chains.runner.check(tasks)
        # there are more images than can be decoded before the first chain
        monkeypatch.setattr("agentfactory.rollout.images.image_intake._CHECK_SECONDS", 0.0)
        await chains.runner.check(tasks)
        with pytest.raises(SettingError, match=told):
            await chains.runner.take(tasks[1], row=2)


async def test_a_model_that_reads_text_refuses_rows_with_images(tmp_path):
    from agentfactory.rollout.text.load_renderer import make_renderer
    from tests.chat_tokenizers import make_tokenizer, trl_template

    Qwen3Config().save_pretrained(tmp_path / "text")
    recipe = RolloutRecipe.model_validate({"model": {"path": str(tmp_path / "text")}})
    async with InferenceClient("http://127.0.0.1:1") as client, open_toolset(recipe, tmp_path) as toolset:
        renderer = make_renderer(make_tokenizer(trl_template("qwen2_5")), tools=False)
        runner = ChainRunner(recipe, renderer, client, toolset, Rewards([]))
        with pytest.raises(SettingError, match=r"eval.data: its rows have images, but .*text accepts only text"):
            await runner.check([{"question": "q", "images": [picture(0)]}], "eval.data")


def test_supervised_rows_have_the_images_as_context(model, tmp_path):
    recipe = RolloutRecipe.model_validate({"model": {"path": model}})
    renderer = load_renderer(recipe.model, "hermes", images=tmp_path / "images")
    messages = [
        {"role": "user", "content": "Look at <image>.", "weight": 0.5},
        {"role": "assistant", "content": "I <|image_pad|> see."},
        {"role": "user", "content": "And <image>?"},
        {"role": "assistant", "content": "That, too."},
    ]
    [task] = renderer.images.take_tasks([{"messages": messages, "images": [picture(0), picture(1, (300, 90))]}], "data")
    row = renderer.conversation_row(task["messages"], [])
    assert len(row.images) == 2
    vision = renderer.images.vision
    assert [i for span in row.images for i in range(span.offset, span.offset + span.length)] == [
        i for i, token in enumerate(row.token_ids) if token == vision.image_token_id
    ]
    assert len(row.token_ids) == len(row.mask) == len(row.weights) == len(row.logprobs)
    assert not any(row.mask[i] or row.weights[i] for s in row.images for i in range(s.offset, s.offset + s.length))
    learned = [token for token, weight in zip(row.token_ids, row.weights, strict=True) if weight == 1.0]
    assert renderer.tokenizer.decode(learned) == "I <|image_pad|> see.<|im_end|>That, too.<|im_end|>"
    # the same ids as a chain that sampled the text
    ids, _ = renderer.images.expand(renderer.open(task["messages"][:1], []), task["messages"][:1])
    assert row.token_ids[: len(ids)] == ids


async def test_a_template_without_images_of_tools_shows_them_in_a_user_turn(tmp_path):
    path = make_vision_model(tmp_path / "model", "qwen3_vl")
    template = vision_template("qwen3_vl")
    start = template.index('elif message.role == "tool"')
    at = template.index("{{- message.content }}", start)
    kept = template.index("<|vision_start|>", at)
    without = template[:kept] + template[kept:].replace("<|vision_start|><|image_pad|><|vision_end|>", "", 1)
    (tmp_path / "own.jinja").write_text(without)
    model = {"path": str(path), "chat_template": str(tmp_path / "own.jinja")}
    async with seeing(str(path), tmp_path, [look(80, 80), "done"], model=model) as chains:
        chain = await chains.run(images=[picture(1)])
        chains.check(chain)
    assert "has no images in tool messages: they follow in a user message" in chains.renderer.info["reasons"]
    assert [m["role"] for m in chain.messages] == ["user", "assistant", "tool", "user", "assistant"]
    assert len(chain.rows[0].images) == 2


@pytest.mark.parametrize("coordinates", ["auto", *Coordinates])
async def test_one_box_of_a_task_is_zoomed_and_judged_in_any_coordinates(tmp_path, model, coordinates):
    picture(1, (300, 200)).save(tmp_path / "wide.png")
    vision = load_vision(model)
    view = view_of(model, vision, coordinates)
    if coordinates == "auto":
        assert view.coordinates == ("resized" if model.endswith("qwen2_5_vl") else "relative1000")
    box = [150, 50, 270, 170]
    places = [round(number, 6) for number in view.from_pixels(box, (300, 200))]
    fields = {"tools": ["image_tools"], "rewards": ["box_iou"]}
    fields["rollout"] = {"max_total_tokens": 9000, "coordinates": coordinates}
    async with seeing(model, tmp_path, [call("zoom", bbox_2d=places), f"It is at {places}."], **fields) as seen:
        task = {"question": "Where?", "images": [str(tmp_path / "wide.png")], "box": box}
        await seen.runner.check([task])
        taken = await seen.runner.take(task)
        chain = await seen.runner.run("c0", taken, Sampling("policy", 1.0, seed="c0"))
        seen.check(chain)
        assert (chain.outcome, chain.metrics["iou"]) == (Outcome.COMPLETED, pytest.approx(1))
        shown = Image.open(seen.renderer.images.files_of(chain.messages)[1])
        part = picture(1, (300, 200)).crop(box)
        assert np.array_equal(np.asarray(shown), np.asarray(vision.fit(part)))
        [info] = [message["info"] for message in chain.messages if "info" in message]
        assert (info["of"], info["box"], info["size"]) == (0, box, [300, 200])
        schema = seen.runner.setup.specs[0].parameters["properties"]["bbox_2d"]["description"]
        assert schema == f"The part as [left, top, right, bottom], {view.words}."


async def test_tools_that_convert_places_need_a_known_way(tmp_path, model, monkeypatch):
    monkeypatch.setattr("agentfactory.rollout.images.families.STATED", {})
    picture(1).save(tmp_path / "a.png")
    row = {"question": "?", "images": [str(tmp_path / "a.png")], "box": [0, 0, 9, 9]}
    for fields, who in (({"tools": ["image_tools"]}, "its tools"), ({"rewards": ["box_iou"]}, "its rewards")):
        async with seeing(model, tmp_path, [], **fields) as seen:
            with pytest.raises(SettingError, match=f"rollout.coordinates: got auto, but {who} convert places in"):
                await seen.runner.check([row])

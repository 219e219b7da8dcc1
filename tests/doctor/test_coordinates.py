"""`agentfactory doctor RECIPE --coordinates`: a model's answers to made pictures, read in every way."""

import asyncio
from base64 import b64decode
from contextvars import ContextVar
from io import BytesIO
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image

from agentfactory.base.findings import Finding, Severity
from agentfactory.commands.doctor.coordinate_checks import check_coordinates, pictures, scores
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.images.families import load_vision
from agentfactory.tools.images.coordinates import Coordinates, ModelView, SizeRule
from tests.project import load_and_check
from tests.seeing_server import SeeingServer
from tests.vision_models import KINDS, make_vision_model, vision_tokenizer

LEARNED = {"qwen2_5_vl": Coordinates.RESIZED, "qwen3_vl": Coordinates.RELATIVE1000}


@pytest.mark.parametrize("pixels", [100_000, 600_000, 1_200_000, 13_000_000])
@pytest.mark.parametrize("token", [28, 32])
def test_no_two_ways_are_mistaken_for_each_other(token: int, pixels: int) -> None:
    rule = SizeRule(token, 4 * token**2, pixels)
    asked = pictures()
    for way in Coordinates:
        view = ModelView(way, rule)
        answers = [str([round(n, 2) for n in view.from_pixels(p.box, p.image.size)]) for p in asked]
        found = scores(asked, answers, rule)
        assert found[way] > 0.9
        # of a model that gets images nearly in full size, its pixels are nearly those of the file
        near = {Coordinates.PIXELS, Coordinates.RESIZED} if pixels > 1_000_000 else {way}
        others = [score for other, score in found.items() if other != way and not {other, way} <= near]
        assert max(others) < 0.4


def test_answers_without_a_box_count_as_wrong() -> None:
    asked = pictures()
    boxes = [str(list(picture.box)) for picture in asked]
    assert scores(asked, [boxes[0], *["no idea"] * (len(asked) - 1)], None)[Coordinates.PIXELS] == 1 / len(asked)
    assert Coordinates.RESIZED not in scores(asked, boxes, None)


SIZE: ContextVar[tuple[int, int]] = ContextVar("SIZE")


class Grounder(SeeingServer):
    """Answers with what its script makes of the size of the image in the request."""

    async def generate(self, request: web.Request) -> web.Response:
        [part] = (await request.json())["content_parts"]
        SIZE.set(Image.open(BytesIO(b64decode(part["url"].partition(",")[2]))).size)
        return await super().generate(request)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy"}]})


def recipe_of(folder: Path, model: Path, url: str) -> Recipe:
    (folder / "tasks.jsonl").write_text('{"question": "?", "answer": "!"}\n')
    (folder / "recipe.yaml").write_text(f"""
model: {{path: {model}, max_image_pixels: 300_000, dtype: float32}}
data: {{path: tasks.jsonl}}
rewards: [exact_match]
server: {{url: {url}, engine: embedded}}
train: {{steps: 1}}
""")
    return load_and_check(folder / "recipe.yaml", lacks=[])


async def asked(folder: Path, kind: str, way: Coordinates) -> list[Finding]:
    """What is found of a model that states places as `way`."""
    model = make_vision_model(folder / "model", kind)
    vision = load_vision(str(model), None, 300_000)
    tokenizer = vision_tokenizer(kind)

    def script(prompt: list[int]) -> list[int]:
        [picture] = [one for one in pictures() if vision.sizes.fitted(*one.image.size) == SIZE.get()]
        places = ModelView(way, vision.sizes).from_pixels(picture.box, picture.image.size)
        return tokenizer.encode(f"{[round(place, 3) for place in places]}<|im_end|>", add_special_tokens=False)

    server = Grounder(script, vision=vision)
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/inference/v1/generate", server.generate), web.get("/openapi.json", server.describe)])
    app.add_routes([web.get("/v1/models", server.models)])
    async with TestServer(app) as served:
        recipe = recipe_of(folder, model, str(served.make_url("")).rstrip("/"))
        return await asyncio.to_thread(lambda: list(check_coordinates(recipe)))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_model_of_a_family_states_places_as_the_family_does(tmp_path: Path, kind: str) -> None:
    *shown, verdict = await asked(tmp_path, kind, LEARNED[kind])
    assert len(shown) == len(pictures())
    assert verdict.severity is Severity.OK, verdict
    assert f"uses {LEARNED[kind]} coordinates " in verdict.text


@pytest.mark.parametrize("way", [Coordinates.PIXELS, Coordinates.RELATIVE1])
async def test_another_way_is_a_problem_with_its_fix(tmp_path: Path, way: Coordinates) -> None:
    verdict = (await asked(tmp_path, "qwen3_vl", way))[-1]
    assert verdict.severity is Severity.PROBLEM
    assert f"uses {way} coordinates (mean IoU: " in verdict.text
    assert "rollout.coordinates is relative1000" in verdict.text
    assert verdict.fix == f"rollout.coordinates={way}"

"""The recipes of GUI agents and for image questions: their data in the hub's columns, tools, prompts and rewards, on
images and in a real browser."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image, ImageDraw

from agentfactory.base.user_code.loading import load_object
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.data import load_tasks
from agentfactory.rollout.images.families import load_vision, view_of
from agentfactory.rollout.trajectory import Outcome, StopReason, Trajectory
from agentfactory.tools.images.coordinates import Coordinates, ModelView, SizeRule
from agentfactory.tools.images.decode import decode
from agentfactory.tools.tool import Finish
from tests.conftest import REPOSITORY
from tests.project import load_and_check
from tests.recipes.chains import chain_of
from tests.scripted_chains import call
from tests.vision_models import make_vision_model
from tests.vision_rows import file_of

GUI = REPOSITORY / "recipes" / "gui_agents"
ComputerUse, Grounding = (load_object(f"computer_use.py:{name}", GUI) for name in ("ComputerUse", "Grounding"))
gui_r1 = load_object("tasks.py:gui_r1", GUI)
KINDS = {"qwen3-vl-4b-grounding-lora-24gb": "qwen3_vl", "qwen2.5-vl-7b-grounding-full-8gpu": "qwen2_5_vl"}
chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium: apt install chromium")

# ---- data


def screenshot(box: list[float]) -> bytes:
    image = Image.new("RGB", (400, 300), "white")
    ImageDraw.Draw(image).rectangle(box, fill="blue")
    return file_of(image)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file, columns and types of the hub's data set."""
    root = tmp_path_factory.mktemp("hub")
    picture = {"bytes": screenshot([100, 150, 200, 225])}
    common = {"image": picture, "history": "None", "gt_input_text": "no input text", "task_type": "low", "id": "a"}
    clicks = [
        common | {"instruction": "a point alone", "gt_action": "click", "gt_bbox": [0.3, 0.6]},
        common | {"instruction": "Press OK", "gt_action": "click", "gt_bbox": [0.25, 0.5, 0.5, 0.75]},
        common | {"instruction": "type", "gt_action": "type", "gt_bbox": [-100.0, -100.0]},
        common | {"instruction": "a step", "gt_action": "click", "gt_bbox": [0.2, 0.2, 0.3, 0.3], "task_type": "high"},
        common | {"instruction": "Close it", "gt_action": "click", "gt_bbox": [0.0, 0.0, 0.1, 1.0]},
        common | {"instruction": "pixels", "gt_action": "click", "gt_bbox": [100.0, 150.0, 200.0, 225.0]},
    ]
    (root / "GUI-R1").mkdir()
    datasets.Dataset.from_list(clicks).to_parquet(root / "GUI-R1" / "train.parquet")
    return root


def test_clicks_of_gui_r1_have_boxes_in_pixels(hub: Path) -> None:
    rows = [*gui_r1(10, path=str(hub / "GUI-R1"))]
    assert [(row["question"], row["box"]) for row in rows] == [
        ("Press OK", [100, 150, 200, 225]),
        ("Close it", [0, 0, 40, 300]),
    ]
    assert rows[0]["images"][0]["bytes"] == screenshot([100, 150, 200, 225])
    assert len([*gui_r1(1, path=str(hub / "GUI-R1"))]) == 1


# ---- a click on a picture

BOX = [100.0, 150.0, 200.0, 225.0]
RULE = SizeRule(28, 4 * 28 * 28, 10**7)
"""400 x 300 pixels become 392 x 308."""


@pytest.mark.parametrize(
    ("coordinates", "place", "hit"),
    [
        # 250 of 1000 are 100 of 400 pixels, and 500 of 1000 are 150 of 300
        ("relative1000", [250, 500], 1),
        ("relative1000", [249, 600], 0),
        ("relative1", [0.25, 0.5], 1),
        ("relative1", [0.51, 0.6], 0),
        # 98 of 392 are 100 of 400 pixels, and 154 of 308 are 150 of 300
        ("resized", [98, 154], 1),
        ("resized", [150, 153], 0),
        ("pixels", [200, 225], 1),
        ("pixels", [150, 226], 0),
    ],
)
async def test_a_click_in_the_box_is_rewarded(coordinates: str, place: list[float], hit: int) -> None:
    picture = Grounding()
    view = ModelView(Coordinates(coordinates), RULE).to_json()
    opening = picture.reset([screenshot(BOX)], BOX, view)
    assert opening == ("The screen has 400 x 300 pixels." if coordinates == "pixels" else None)
    assert isinstance(await picture.computer_use("left_click", coordinate=place), Finish)
    assert picture.reward() == {"reward": hit, "success": hit, "clicked": 1}


async def test_what_is_no_click_is_not_rewarded() -> None:
    picture = Grounding()
    for asked in ({"action": "mouse_move", "coordinate": [150, 200]}, {"action": "terminate", "status": "success"}):
        picture.reset([screenshot(BOX)], BOX)
        assert isinstance(await picture.computer_use(**asked), Finish)
        assert picture.reward() == {"reward": 0, "success": 0, "clicked": 0}
    for asked, problem in (
        ({"action": "left_click"}, "coordinate: left_click needs it"),
        ({"action": "type"}, "text: type needs it"),
        ({"action": "left_click", "coordinate": [401, 0]}, r"coordinate: got \[401, 0\], outside of the image"),
    ):
        with pytest.raises(ValueError, match=problem):
            await picture.computer_use(**asked)
    with pytest.raises(ValueError, match="box: got"):
        picture.reset([screenshot(BOX)], [5, 5, 1, 9])


def small(file: Path, folder: Path, kind: str) -> Recipe:
    """A recipe with a small network of the model's family."""
    loaded = load_and_check(str(file), [], "train", [])
    path = make_vision_model(folder / kind, kind)
    model = {"path": str(path), "dtype": "float32", "max_image_pixels": 300_000}
    rollout = loaded.rollout.model_copy(update={"max_total_tokens": 30_000})
    return loaded.model_copy(update={"model": loaded.model.model_copy(update=model), "rollout": rollout})


@pytest.mark.processes  # the recipe asks whether vLLM is installed
@pytest.mark.parametrize("name", KINDS)
async def test_a_chain_clicks_on_a_row_of_the_hub(name: str, hub: Path, tmp_path: Path) -> None:
    recipe = small(GUI / f"{name}.yaml", tmp_path, KINDS[name])
    data = recipe.data.model_copy(update={"options": {"limit": 5, "path": str(hub / "GUI-R1")}})
    task = load_tasks(data)[0]
    view = view_of(recipe.model.path, load_vision(recipe.model.path, None, 300_000))
    for pixels, hit in (([150, 180], 1.0), ([90, 180], 0.0)):
        place = [round(number) for number in view.from_pixels(pixels, (400, 300))]
        chain = await chain_of(
            recipe, GUI, task, [call("computer_use", action="left_click", coordinate=place)], tmp_path / "seen"
        )
        assert (chain.outcome, chain.stop_reason) == (Outcome.COMPLETED, StopReason.FINISH), chain.error
        assert (chain.reward, chain.metrics["success"]) == (hit, hit)
    said = await chain_of(recipe, GUI, task, ["I would click OK."], tmp_path / "seen")
    assert (said.outcome, said.reward, said.metrics["clicked"]) == (Outcome.COMPLETED, 0.0, 0.0)
    wrong = await chain_of(recipe, GUI, task, [call("computer_use", action="left_click")], tmp_path / "seen")
    assert (wrong.outcome, wrong.reward) == (Outcome.MAX_TURNS, 0.0)


# ---- the tool in a browser

EVENTS = """<body style='margin:0; height:3000px; width:3000px'><input id=field style='position:fixed; left:0; top:0'>
<script>
window.seen = [];
for (const kind of ['click', 'dblclick', 'contextmenu', 'auxclick', 'mousedown', 'mouseup'])
  addEventListener(kind, e => { seen.push([kind, e.clientX, e.clientY, e.detail]); e.preventDefault(); });
</script>"""


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Any]:
    made = ComputerUse(width=320, height=240, scale=2.0)
    yield made
    await made.close()


@pytest.mark.processes
@chromium
async def test_each_action_does_what_it_says(browser: Any) -> None:
    await browser.reset(page="form", seed=0, model_view=ModelView(Coordinates.RELATIVE1000, RULE).to_json())
    page = browser._page
    await page.set_content(EVENTS)

    async def seen() -> list[list[Any]]:
        return await page.evaluate("() => seen.splice(0)")

    place = {"coordinate": [500, 500]}  # of 320 x 240 CSS pixels: 160, 120
    for action, last in (
        ("left_click", ["click", 160, 120, 1]),
        ("double_click", ["dblclick", 160, 120, 2]),
        ("triple_click", ["click", 160, 120, 3]),
        ("right_click", ["contextmenu", 160, 120, 0]),
        ("middle_click", ["auxclick", 160, 120, 1]),
    ):
        result = await browser.computer_use(action, **place)
        assert result["places"] == [[320, 240]]  # in pixels of the picture
        assert last[:3] in [event[:3] for event in await seen()], action
    await browser.computer_use("mouse_move", coordinate=[250, 250])
    await browser.computer_use("left_click_drag", coordinate=[500, 750])
    drag = [event[:3] for event in await seen() if event[0] in ("mousedown", "mouseup")]
    assert drag == [["mousedown", 80, 60], ["mouseup", 160, 180]]
    # 200 pixels of the picture are 100 of the page's
    await browser.computer_use("scroll", pixels=-200, **place)
    await browser.computer_use("hscroll", pixels=100)
    assert await page.evaluate("() => [scrollX, scrollY]") == [50, 100]
    await browser.computer_use("scroll", pixels=80)
    assert await page.evaluate("() => [scrollX, scrollY]") == [50, 60]
    await page.focus("#field")
    await browser.computer_use("type", text="Hello")
    await browser.computer_use("key", keys=["ctrl", "a"])
    await browser.computer_use("key", keys=["backspace"])
    await browser.computer_use("type", text="x")
    assert await page.input_value("#field") == "x"
    assert len((await browser.computer_use("wait", time=0.1))["observation"]) == 1
    with pytest.raises(ValueError, match=r"coordinate: got \[1200, 0\], outside of the image"):
        await browser.computer_use("left_click", coordinate=[1200, 0])
    with pytest.raises(ValueError, match="keys: got 'hyper'"):
        await browser.computer_use("key", keys=["hyper"])
    for ending in ({"action": "answer", "text": "42"}, {"action": "terminate", "status": "failure"}):
        assert isinstance(await browser.computer_use(**ending), Finish)


@pytest.mark.processes
@pytest.mark.extended
@chromium
async def test_a_chain_of_the_recipe_solves_a_page_of_miniwob(tmp_path: Path) -> None:
    recipe = small(GUI / "qwen3-vl-4b-browser-lora-24gb.yaml", tmp_path, "qwen3_vl")
    assert {task["seed"] for task in load_tasks(recipe.data)}.isdisjoint(
        task["seed"] for task in load_tasks(recipe.eval.data)
    )
    looks = ComputerUse(width=160, height=210)
    try:
        await looks.reset(miniwob="click-test", seed=1)
        left, top, right, bottom = await looks._page.evaluate(
            "() => { const b = document.querySelector('#subbtn').getBoundingClientRect();"
            " return [b.left, b.top, b.right, b.bottom]; }"
        )
    finally:
        await looks.close()
    view = view_of(recipe.model.path, load_vision(recipe.model.path, None, 300_000))
    # the picture has four times the page's pixels
    place = [round(number) for number in view.from_pixels([2 * (left + right), 2 * (top + bottom)], (640, 840))]
    texts = [call("computer_use", action="wait", time=0.2), call("computer_use", action="left_click", coordinate=place)]
    task = {"question": "", "miniwob": "click-test", "seed": 1}
    chain = await chain_of(recipe, GUI, task, texts, tmp_path / "seen")
    assert (chain.outcome, chain.stop_reason) == (Outcome.COMPLETED, StopReason.FINISH), chain.error
    assert (chain.reward, chain.turns) == (1.0, 2)
    assert len(chain.rows[0].images) == 2  # as it opened, and after the first turn
    other = await chain_of(
        recipe, GUI, task, [call("computer_use", action="terminate", status="success")], tmp_path / "seen"
    )
    assert other.reward == 0.0


# ---- image questions


QUESTIONS = REPOSITORY / "recipes" / "image_questions"
SOURCES = {
    "qwen3-vl-4b-search-lora-24gb": "scenes",
    "qwen2.5-vl-7b-search-full-8gpu": "scenes",
    "qwen3-vl-4b-chartqa-lora-24gb": "charts",
    "qwen3-vl-4b-docvqa-lora-24gb": "documents",
}
"""Recipe -> our own rows in place of its data."""
PROMPT, SearchReward, trained, v_star, hr_bench = (
    load_object(f"image_questions.py:{name}", QUESTIONS)
    for name in ("PROMPT", "SearchReward", "trained", "v_star", "hr_bench")
)


@pytest.fixture(scope="module", params=sorted(SOURCES))
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe with a small network of the model's family, and our own rows."""
    kind = "qwen2_5_vl" if "qwen2.5" in request.param else "qwen3_vl"
    loaded = small(QUESTIONS / f"{request.param}.yaml", tmp_path_factory.mktemp("model"), kind)
    data = loaded.data.model_copy(
        update={
            "source": f"{QUESTIONS}/examples.py:{SOURCES[request.param]}",
            "path": None,
            "options": {},
            "columns": {},
        }
    )
    # without a judge
    options = [{key: one.options[key] for key in one.options.keys() - {"url", "model"}} for one in loaded.rewards]
    rewards = [reward.model_copy(update={"options": own}) for reward, own in zip(loaded.rewards, options, strict=True)]
    return loaded.model_copy(update={"data": data.model_copy(update={"split": "train"}), "rewards": rewards})


@pytest.mark.processes  # the recipe asks whether vLLM is installed
async def test_a_chain_looks_closer_and_is_judged(recipe: Recipe, tmp_path: Path) -> None:
    task = load_tasks(recipe.data)[0]
    images = task["images"]
    search = recipe.rewards[0].reward.endswith("image_questions.py:SearchReward")
    view = view_of(recipe.model.path, load_vision(recipe.model.path, None, 300_000))
    box = [int(edge) for edge in view.from_pixels(task.get("box", [100, 100, 400, 400]), images[0].size)]
    name = "image_zoom_in_tool" if search else "zoom"
    answer = task["answer"] if search else task["answer"][0]
    texts = [f"<think>Where?</think>{call(name, bbox_2d=box)}", f"<answer>{answer}</answer>"]
    chain = await chain_of(recipe, QUESTIONS, task, texts, tmp_path)
    assert chain.outcome is Outcome.COMPLETED, chain.error
    assert chain.metrics["success"] == 1
    assert chain.reward == pytest.approx(2.0 if search else 1.1)
    [shown] = [message for message in chain.messages if message["role"] == "tool"]
    assert [part["type"] for part in shown["content"]] == ["image_url"] if search else ["text", "image_url"]
    wrong = await chain_of(recipe, QUESTIONS, task, ["<answer>no such thing at all</answer>"], tmp_path)
    assert (wrong.metrics["success"], wrong.reward) == (0, pytest.approx(0.0 if search else 0.1))


def said(*texts: str, looked: bool = False) -> Trajectory:
    messages = [{"role": "user", "content": "?"}, *([{"role": "tool", "content": "x"}] if looked else [])]
    messages += [{"role": "assistant", "content": text} for text in texts]
    return Trajectory("c", messages, [], Outcome.COMPLETED, turns=len(texts))


@pytest.mark.parametrize(
    ("text", "looked", "answer", "reward"),
    [
        ("<think>a</think><answer>B</answer>", True, "B", 2.0),
        ("<think>a</think><answer>B. red</answer>", False, "B", 0.8),
        ("<think>a</think><answer>A</answer>", True, "B", 0.0),
        ("<answer>Red</answer>", True, "red", 2.0),
        ("<think>a<answer>B</answer>", True, "B", 1.8),
        ("B", True, "B", -0.2),
    ],
)
async def test_looking_pays_if_the_answer_is_right(text: str, looked: bool, answer: str, reward: float) -> None:
    verdict = await SearchReward()(said(text, looked=looked), text, "?", answer)
    assert verdict["reward"] == pytest.approx(reward)


def test_rows_of_the_hub_become_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = {"bytes": b"...", "path": None}
    search = {"extra_info": {"question": "What color?"}, "reward_model": {"ground_truth": "red"}, "images": [picture]}
    star = {"image": Image.new("RGB", (4, 4)), "text": "Which?\n(A) a", "label": "A", "category": "relative_position"}
    high = {"question": "Which?", **dict(zip("ABCD", "wxyz", strict=True)), "answer": "C", "category": "single"}
    high["image"] = "/9j/4AAQ"
    asked = []

    def load_dataset(path: str, *names: str, **options: object) -> object:
        asked.append((path, *names, options["split"]))
        if "DeepEyes" in path:
            return iter([search] * 3)
        return datasets.Dataset.from_list([high]) if "HR-Bench" in path else datasets.Dataset.from_list([star])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [*trained(2)] == [{"question": f"What color?{PROMPT}", "images": [picture], "answer": "red"}] * 2
    [one] = v_star()
    assert one["question"] == f"Which?\n(A) a{PROMPT}"
    assert decode(one["images"][0]).size == (4, 4)
    [two] = hr_bench("8k")
    assert two["question"] == f"Question: Which?\nOptions:\nA. w\nB. x\nC. y\nD. z\n{PROMPT}"
    assert (two["answer"], two["images"]) == ("C", ["/9j/4AAQ"])
    assert asked[2] == ("DreamMr/HR-Bench", "hrbench_version_split", "hrbench_8k")

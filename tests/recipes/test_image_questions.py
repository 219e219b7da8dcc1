"""The recipes for image questions: chains on our own images, with their tools, prompts and rewards."""

from pathlib import Path

import datasets
import pytest
from PIL import Image

from agentfactory.base.user_code.loading import load_object
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.data import load_tasks
from agentfactory.rollout.images.families import load_vision, view_of
from agentfactory.rollout.trajectory import Outcome, Trajectory
from agentfactory.tools.images.decode import decode
from tests.conftest import REPOSITORY
from tests.project import load_and_check
from tests.recipes.chains import chain_of
from tests.scripted_chains import call
from tests.vision_models import make_vision_model

FOLDER = REPOSITORY / "recipes" / "image_questions"
SOURCES = {
    "qwen3-vl-4b-search-lora-24gb": "scenes",
    "qwen2.5-vl-7b-search-full-8gpu": "scenes",
    "qwen3-vl-4b-chartqa-lora-24gb": "charts",
    "qwen3-vl-4b-docvqa-lora-24gb": "documents",
}
"""Recipe -> our own rows in place of its data."""
PROMPT, SearchReward, trained, v_star, hr_bench = (
    load_object(f"image_questions.py:{name}", FOLDER)
    for name in ("PROMPT", "SearchReward", "trained", "v_star", "hr_bench")
)


@pytest.fixture(scope="module", params=sorted(SOURCES))
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe with a small network of the model's family, and our own rows."""
    loaded = load_and_check(str(FOLDER / f"{request.param}.yaml"), [], "train", [])
    kind = "qwen2_5_vl" if "qwen2.5" in request.param else "qwen3_vl"
    path = make_vision_model(tmp_path_factory.mktemp("model") / kind, kind)
    data = loaded.data.model_copy(
        update={"source": f"{FOLDER}/examples.py:{SOURCES[request.param]}", "path": None, "options": {}, "columns": {}}
    )
    updates = {
        "model": loaded.model.model_copy(update={"path": str(path), "dtype": "float32", "max_image_pixels": 300_000}),
        "data": data.model_copy(update={"split": "train"}),
        "rollout": loaded.rollout.model_copy(update={"max_total_tokens": 20_000}),
        # without a judge
        "rewards": [reward.model_copy(update={"options": _without_judge(reward.options)}) for reward in loaded.rewards],
    }
    return loaded.model_copy(update=updates)


def _without_judge(options: dict) -> dict:
    return {key: value for key, value in options.items() if key not in ("url", "model")}


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
    chain = await chain_of(recipe, FOLDER, task, texts, tmp_path)
    assert chain.outcome is Outcome.COMPLETED, chain.error
    assert chain.metrics["success"] == 1
    assert chain.reward == pytest.approx(2.0 if search else 1.1)
    [shown] = [message for message in chain.messages if message["role"] == "tool"]
    assert [part["type"] for part in shown["content"]] == ["image_url"] if search else ["text", "image_url"]
    wrong = await chain_of(recipe, FOLDER, task, ["<answer>no such thing at all</answer>"], tmp_path)
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

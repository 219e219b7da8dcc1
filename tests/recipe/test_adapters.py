"""Adapters that a recipe continues or merges: from the stage before, or from a folder."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from transformers import Qwen3Config

from agentfactory.base.errors import SettingError
from agentfactory.launching.launch_plan import State, plan_run
from agentfactory.launching.run_folder import RunFolder
from agentfactory.placement.meta_model import check_targets
from agentfactory.recipe.adapters import doubts
from agentfactory.recipe.schema import Recipe, StagedRecipe
from tests.placement.shapes import sizes
from tests.project import load_and_check, refused

FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"

Make = Callable[..., Path]


@pytest.fixture
def stages(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two stages that train adapters of rank 8, on a machine without a GPU."""
    monkeypatch.setattr("agentfactory.launching.placement.GPU_DRIVERS", ())
    recipe = yaml.safe_load((project / "recipe.yaml").read_text())
    for name in ("first", "second"):
        own = {**recipe, "name": name, "model": {**recipe["model"], "lora": {"rank": 8}}}
        (project / f"{name}.yaml").write_text(yaml.safe_dump(own))
    (project / "both.yaml").write_text("stages: [first.yaml, second.yaml]\n")
    return project


@pytest.fixture
def make_adapter(project: Path) -> Make:
    """`make_adapter(**config)`: a folder as peft writes it, of an adapter on q_proj with rank 4."""

    def make(tensors: tuple[str, ...] = (FACTOR.format("A"), FACTOR.format("B")), **config: Any) -> Path:
        folder = project / "adapter"
        folder.mkdir(exist_ok=True)
        plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
        base = {"base_model_name_or_path": str(project / "model")}
        (folder / "adapter_config.json").write_text(json.dumps({**plain, **base, **config}))
        save_file({name: np.zeros((4, 4), dtype=np.float32) for name in tensors}, folder / "adapter_model.safetensors")
        return folder

    return make


def both(*overrides: str) -> StagedRecipe:
    return load_and_check("both.yaml", overrides)


def single(*overrides: str) -> Recipe:
    return load_and_check("recipe.yaml", overrides)


# stages


def test_a_stage_continues_the_adapter_of_the_one_before_on_the_same_base(stages: Path) -> None:
    plan = plan_run(both(), None)
    first, second = plan.stages
    lora = second.recipe.model.lora
    assert second.recipe.model.path == first.recipe.model.path == str(stages / "model")
    assert lora.from_ == str(stages / "runs/both/first/checkpoints/step-000010")
    assert str(stages / "model") in second.server.arguments
    (line,) = (line for line in plan.describe() if "adapter" in line)
    assert line.startswith("second: continues the adapter in runs/both/first/checkpoints/step-000010 (rank 8)")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["second.model.lora.rank=4"], "rank is 4, not 8"),
        (["second.model.lora=null"], "second trains all weights"),
        (["second.model.lora.merge=true"], None),
    ],
)
def test_a_stage_that_differs_begins_with_a_merged_model(stages: Path, settings: list[str], reason: str | None) -> None:
    plan = plan_run(both(*settings), None)
    stage = plan.stages[1]
    adapter = stages / "runs/both/first/checkpoints/step-000010"
    assert (stage.merge.adapter, stage.merge.base) == (adapter, str(stages / "model"))
    assert stage.recipe.model.path == str(stage.merge.output) == str(stages / "runs/both/second/merged")
    lora = stage.recipe.model.lora
    assert lora is None or (lora.from_, lora.merge) == (None, None), "the trainer gets a recipe like any other"
    said = stage.describe_adapter()
    assert said.startswith("the adapter in runs/both/first/checkpoints/step-000010 is first merged into ")
    assert said.endswith(f"({reason})" if reason else "runs/both/second/merged")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ("model.lora={rank: 4, merge: false}", "model.lora.rank: got 4, and the adapter of stage first has 8; fix"),
        ("train.vision=trained", "train.vision: got 'trained', and stage first trained its adapter with 'frozen'"),
        ("model.lora.merge=true second.server.url=http://127.0.0.1:9", "server.url: .* merges into it"),
    ],
)
def test_what_cannot_follow_is_named(stages: Path, settings: str, error: str) -> None:
    refused(f"second.{error}", *re.split(" (?=second|first)", f"second.{settings}"), path="both.yaml")


def test_a_saved_recipe_of_stages_goes_on_in_the_same_way(stages: Path) -> None:
    for settings in ([], ["second.model.lora.rank=4"]):
        recipe = both(*settings)
        (stages / "saved.yaml").write_text(recipe.to_yaml())
        assert load_and_check("saved.yaml") == recipe
        assert "${output}/" not in recipe.to_yaml(), "--overwrite would refuse it"


# from a folder


def test_a_folder_of_peft_gives_the_fields_that_are_left_out(make_adapter: Make) -> None:
    folder = make_adapter()
    recipe = single("model.lora={from: adapter}")
    assert recipe.model.lora.model_dump() == {
        **{"rank": 4, "alpha": 4, "target_modules": ["q_proj"], "from": str(folder), "merge": False},
        **{"dropout": 0.0, "quantization": None, "trainable_tokens": None},
    }
    assert plan_run(recipe, None).stages[0].recipe == recipe
    assert not any("lora" in doubt for doubt in doubts(recipe))
    (Path("saved.yaml")).write_text(recipe.to_yaml())
    assert load_and_check("saved.yaml") == recipe


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("init_lora_weights", "pissa"),
        ("tensors", ("base_model.model.model.embed_tokens.lora_embedding_A",)),
    ],
)
def test_an_adapter_that_is_not_plain_is_merged_or_refused_by_name(make_adapter: Make, field: str, value: Any) -> None:
    make_adapter(**{field: value})
    named = "embedding_A" if field == "tensors" else field
    told = rf"model\.lora\.from: .* cannot be trained further: .*{named}.*; fix: set model\.lora\.merge=true"
    refused(told, "model.lora={from: adapter}")
    assert plan_run(single("model.lora={from: adapter, merge: true}"), None).stages[0].merge is not None


@pytest.mark.parametrize(
    ("lora", "error"),
    [
        ("{rank: 4, from: full}", r"full has no adapter_config\.json; fix: name a folder written by peft"),
        ("{rank: 4, merge: true}", r"model\.lora\.merge: got true, but there is no adapter to merge"),
        ("{from: prompt}", r"another kind: peft_type: PROMPT_TUNING"),
        ("{from: adapter, merge: false, rank: 8}", r"model\.lora\.rank: got 8, and the adapter in adapter has 4"),
        ("{from: run}", r"lora\.from: run has no adapter_config.*; fix: name a folder written by peft"),
    ],
)
def test_adapters_that_cannot_be_continued(make_adapter: Make, project: Path, lora: str, error: str) -> None:
    make_adapter()
    for name in ("full", "prompt"):
        (project / name).mkdir()
    for step in (10, 20):
        (project / "run" / "sft" / "checkpoints" / f"step-{step:06}").mkdir(parents=True)
    (project / "full" / "config.json").write_text("{}")
    (project / "prompt" / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    refused(error, f"model.lora={lora}")


# resumption


def test_a_run_from_a_merged_model_resumes_with_the_same_adapter_only(make_adapter: Make, project: Path) -> None:
    make_adapter()
    given = "model.lora={from: adapter, rank: 8}"
    (stage,) = plan_run(single(given), None).stages
    RunFolder.create(stage.folder.path, stage.recipe.to_saved())
    stage.merge.output.mkdir()
    origin = {"base": str(project / "model"), "adapter_sha256": "of another"}
    (stage.merge.output / "merged_from.json").write_text(json.dumps(origin))
    with pytest.raises(SettingError, match=r"model\.lora\.from: adapter is not the adapter that .*merged was merged"):
        plan_run(single(given), "auto")
    from agentfactory.trainers.checkpoints.checkpoint_folder import digest

    origin["adapter_sha256"] = digest(project / "adapter" / "adapter_model.safetensors")
    (stage.merge.output / "merged_from.json").write_text(json.dumps(origin))
    (resumed,) = plan_run(single(given), "auto").stages
    assert resumed.state is State.STARTED
    saved = str(stage.folder.recipe)
    again, elsewhere = (load_and_check(saved, [f"output={output}"]) for output in (stage.folder.path, "other"))
    assert again.model == elsewhere.model == stage.recipe.model, "the merged model is the run's, wherever it runs again"
    with pytest.raises(SettingError, match=r"model\.lora\.alpha"):
        plan_run(single("model.lora={from: adapter, rank: 8, alpha: 9}"), "auto")
    with pytest.raises(SettingError, match=r"model\.path: .*other is not the base"):
        plan_run(single(given, "model.path=hub/other"), "auto")


@pytest.mark.parametrize(
    ("path", "targets", "told"),
    [
        ("network", "[q_proj, nope_proj, oj]", "'nope_proj' and 'oj' fits no module of the network; fix: use names"),
        ("network", "[]", r"target_modules: got \[\]: no module would get an adapter; fix: use all"),
        ("broken", "[q_proj]", "model.path: no network can be made of .*broken: "),
        ("network", "'.*layers.*q_proj'", None),
        ("hub/name", "[nope_proj]", None),
    ],
)
def test_targets_that_fit_no_module_are_refused(project: Path, path: str, targets: str, told: str | None) -> None:
    Qwen3Config(**sizes(32, 32, 1, 2, 1, 64), head_dim=16).save_pretrained(project / "network")
    (project / "broken").mkdir()
    (project / "broken" / "config.json").write_text("{")
    with pytest.raises(SettingError, match=told) if told else nullcontext():
        check_targets(single(f"model.path={path}", f"model.lora={{rank: 4, target_modules: {targets}}}"))

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
from transformers import Qwen3Config, ViTConfig

from agentfactory.base.errors import SettingError
from agentfactory.launching.launch_plan import State, plan_run
from agentfactory.launching.run_folder import RunFolder
from agentfactory.placement.meta_model import check_model
from agentfactory.recipe.checks import doubts
from agentfactory.recipe.schema import Recipe, StagedRecipe
from tests.placement.shapes import sizes
from tests.project import load_and_check, refused

FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"

Make = Callable[..., Path]


@pytest.fixture
def stages(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two stages that train adapters of rank 8, on a machine without a GPU."""
    monkeypatch.setattr("agentfactory.base.processes.devices.GPU_DRIVERS", ())
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


def test_fields_that_are_left_out_are_those_of_the_adapter_before(stages: Path) -> None:
    text = (stages / "second.yaml").read_text().replace("lora:\n    rank: 8", "lora: {}")
    (stages / "second.yaml").write_text(text)
    given = ["first.model.lora={rank: 3, alpha: 5, target_modules: [q_proj]}"]
    lora = both(*given).stages[1].model.lora
    assert (lora.rank, lora.alpha, lora.target_modules, lora.merge) == (3, 5, ["q_proj"], False)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["second.model.lora.rank=4"], "rank is 4, not 8"),
        (["second.model.lora.alpha=4"], "alpha is 4.0, not 16"),
        (["second.model.lora.target_modules=[q_proj]"], "target_modules is ['q_proj'], not 'all-linear'"),
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
        ("model.lora.merge=true first.model.lora=null", "model.lora.merge: got true, but stage first trains all"),
        ("train.vision=trained", "train.vision: got 'trained', and stage first trained its adapter with 'frozen'"),
        ("model.lora.merge=true second.server.model=model", "server.model: .* merges into it"),
        ("model.lora.merge=true second.server.url=http://127.0.0.1:9", "server.url: .* merges into it"),
    ],
)
def test_what_cannot_follow_is_named(stages: Path, settings: str, error: str) -> None:
    refused(f"second.{error}", *re.split(" (?=second|first)", f"second.{settings}"), path="both.yaml")


def test_a_four_bit_base_stays_as_it_is(stages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfactory.recipe.train_checks.is_installed", lambda name: True)
    for own, expected in (("{rank: 8}", "nf4"), ("{rank: 8, quantization: null}", None), ("{rank: 4}", None)):
        text = yaml.safe_load((stages / "second.yaml").read_text())
        text["model"]["lora"] = yaml.safe_load(own)
        (stages / "second.yaml").write_text(yaml.safe_dump(text))
        lora = both("first.model.lora.quantization=nf4").stages[1].model.lora
        assert lora.quantization == expected


def test_adapters_go_on_over_three_stages(stages: Path) -> None:
    (stages / "third.yaml").write_text((stages / "second.yaml").read_text().replace("name: second", "name: third"))
    (stages / "both.yaml").write_text("stages: [first.yaml, second.yaml, third.yaml]\n")
    runs = stages / "runs/both"
    for settings, path, origin in (
        ([], stages / "model", "second"),
        (["second.model.lora.merge=true"], runs / "second/merged", "second"),
        (["first.model.lora=null"], runs / "first/checkpoints/step-000010", "second"),
    ):
        third = plan_run(both(*settings), None).stages[2].recipe.model
        assert third.path == str(path)
        assert third.lora.from_ == str(runs / origin / "checkpoints/step-000010")


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
        **{"quantization": None, "trainable_tokens": None},
    }
    assert plan_run(recipe, None).stages[0].recipe == recipe
    assert not any("lora" in doubt for doubt in doubts(recipe))
    (Path("saved.yaml")).write_text(recipe.to_yaml())
    assert load_and_check("saved.yaml") == recipe


def test_an_adapter_that_differs_is_merged(make_adapter: Make, project: Path) -> None:
    make_adapter()
    for settings in ("{from: adapter, rank: 8}", "{from: adapter, merge: true}", "{from: adapter, alpha: 3}"):
        (stage,) = plan_run(single(f"model.lora={settings}"), None).stages
        assert (stage.merge.adapter, stage.merge.base) == (project / "adapter", str(project / "model"))
        assert stage.recipe.model.path == str(project / "runs/recipe/merged")


def test_a_checkpoint_of_another_run_is_continued(make_adapter: Make, project: Path) -> None:
    make_adapter(target_modules=["k_proj", "q_proj"], r=8, lora_alpha=16)
    checkpoint = project / "other" / "checkpoints" / "step-000003"
    checkpoint.parent.mkdir(parents=True)
    (project / "adapter").rename(checkpoint)
    info = {"step": 3, "recipe": {"model": {"path": "model", "lora": {"rank": 8, "target_modules": "all-linear"}}}}
    (checkpoint / "trainer_state.json").write_text(json.dumps(info))
    lora = single(f"model.lora={{from: {checkpoint}, rank: 8, target_modules: all-linear}}").model.lora
    assert (lora.merge, lora.alpha) == (False, 16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("rank_pattern", {"q_proj": 2}),
        ("layers_to_transform", [0]),
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
        ("{rank: 4, from: none}", r"model\.lora\.from: none: no such folder"),
        ("{rank: 4, from: model}", r"model\.lora\.from: model has no adapter_config"),
        ("{rank: 4, from: full}", r"full holds a full model; fix: name it as model\.path"),
        ("{rank: 4, merge: true}", r"model\.lora\.merge: got true, but there is no adapter to merge"),
        ("{from: prompt}", r"another kind: peft_type: PROMPT_TUNING"),
        ("{from: pickled}", r"pickled has no adapter_model\.safetensors"),
        ("{from: adapter, merge: false, rank: 8}", r"model\.lora\.rank: got 8, and the adapter in adapter has 4"),
        ("{from: adapter, target_modules: all-linear}", r"target_modules: got 'all-linear', and .* \['q_proj'\]; fix"),
        ("{from: run}", r"lora\.from: run has no adapter_config.*; fix: name .* as run/sft/checkpoints/step-000020"),
        ("{from: run, rank: 8}", r"lora\.from: run has no adapter_config\.json; fix: name one of its checkpoints"),
        ("{from: run/sft}", r"such as run/sft/checkpoints/step-000020"),
        ("{from: run/sft/checkpoints}", r"such as run/sft/checkpoints/step-000020"),
        ("{from: adapter, form: x}", r"did you mean model\.lora\.from\?"),
    ],
)
def test_adapters_that_cannot_be_continued(make_adapter: Make, project: Path, lora: str, error: str) -> None:
    folder = make_adapter()
    for name in ("full", "prompt", "pickled"):
        (project / name).mkdir()
    for step in (10, 20):
        (project / "run" / "sft" / "checkpoints" / f"step-{step:06}").mkdir(parents=True)
    (project / "full" / "config.json").write_text("{}")
    (project / "prompt" / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    (project / "pickled" / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    refused(error, f"model.lora={lora}")


def test_an_adapter_as_the_model_is_refused_with_the_two_fields(make_adapter: Make) -> None:
    make_adapter()
    refused(r"model\.path: adapter holds a LoRA adapter.*model\.lora\.from=adapter", "model.path=adapter")


def test_another_base_or_chat_template_is_a_warning(make_adapter: Make, project: Path) -> None:
    make_adapter(base_model_name_or_path="someone/another-model")
    (project / "adapter" / "chat_template.jinja").write_text("other")
    (project / "model" / "chat_template.jinja").write_text("own")
    base, template = doubts(single("model.lora={from: adapter}"))[:2]
    assert base.startswith("model.lora.from: adapter was trained on someone/another-model, and model.path is ")
    assert template.endswith("fix: model.chat_template=adapter/chat_template.jinja")
    make_adapter(base_model_name_or_path="hub/model")
    recipe = single("model.lora={from: adapter}", "model.chat_template=adapter/chat_template.jinja")
    assert not any("lora" in doubt for doubt in doubts(recipe))


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


def test_a_continued_adapter_must_stay_as_it_was(make_adapter: Make, project: Path) -> None:
    from agentfactory.launching.resumption import content_digests

    make_adapter()
    recipe = single("model.lora={from: adapter}")
    before = content_digests(recipe)["model.lora.from"]
    make_adapter(tensors=(FACTOR.format("A"),))
    assert content_digests(recipe)["model.lora.from"] != before


@pytest.mark.parametrize(
    ("path", "targets", "told"),
    [
        ("network", "[q_proj, nope_proj, oj]", "'nope_proj' and 'oj' fits no module of the network; fix: use names"),
        ("network", "'.*nope'", "fits no module of the network"),
        ("network", "[]", r"target_modules: got \[\]: no module would get an adapter; fix: use all"),
        ("eyes", "[q_proj]", "model.path: no network can be made of .*eyes: "),
        ("broken", "[q_proj]", "model.path: no network can be made of .*broken: "),
        ("network", "[q_proj, self_attn.q_proj]", None),
        ("network", "'.*layers.*q_proj'", None),
        ("network", "all-linear", None),
        ("hub/name", "[nope_proj]", None),
    ],
)
def test_targets_that_fit_no_module_are_refused(project: Path, path: str, targets: str, told: str | None) -> None:
    Qwen3Config(**sizes(32, 32, 1, 2, 1, 64), head_dim=16).save_pretrained(project / "network")
    ViTConfig().save_pretrained(project / "eyes")
    (project / "broken").mkdir()
    (project / "broken" / "config.json").write_text("{")
    with pytest.raises(SettingError, match=told) if told else nullcontext():
        check_model(single(f"model.path={path}", f"model.lora={{rank: 4, target_modules: {targets}}}"), None)

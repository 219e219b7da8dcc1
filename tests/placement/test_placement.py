"""Where trainer and server go, what fits, and what is said where nothing does: the choice on given figures, and the
commands as a person runs them."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from transformers import Qwen2Config, Qwen3Config

from agentfactory.base.errors import SettingError
from agentfactory.launching import launch_plan as plan
from agentfactory.launching import launcher
from agentfactory.launching.placement import Placement
from agentfactory.placement.__main__ import place as plan_for
from agentfactory.placement.machine import MARGIN, Gpu, Machine
from agentfactory.placement.meta_model import SHAPES, load_config
from agentfactory.placement.plan_choice import GIB, Need, Plan, choose, rows, table
from agentfactory.placement.server_memory import ServerMemory, meta_network, server_memory
from agentfactory.placement.suggested_changes import refusal
from agentfactory.recipe.schema import Recipe, StagedRecipe, updated
from tests.placement.shapes import sizes
from tests.project import Command, load_and_check, refused

NO_GPU = Machine((), 64 * GIB, 60 * GIB)
VLLM = {"server": {"engine": "vllm"}}


def recipe(**sections: Any) -> Recipe:
    data = {
        "name": "test",
        "output": "/nowhere",
        "model": {"path": "model", "lora": {"rank": 8}},
        "train": {"steps": 1, "token_budget": 16384},
        "rollout": {"max_total_tokens": 4096, "group_size": 8},
        "placement": {"gpu_memory_gib": 24},
        **VLLM,
    }
    return Recipe.model_validate(data | {name: {**data.get(name, {}), **given} for name, given in sections.items()})


def gpus(*free: float, total: float = 24.0) -> Machine:
    return Machine(tuple(Gpu(int(total * GIB), int(size * GIB)) for size in free), 64 * GIB, 60 * GIB)


def estimate(weights: float = 6.0, activations: float = 4.0, cache: float = 2.0) -> Callable[..., Need]:
    """A model of so many GiB, activations of so many at 16,384 tokens; what changes them changes them as it would."""

    def figures(asked: Recipe, device: str, memory: int | None) -> Need:
        train, lora, server = asked.train, asked.model.lora, asked.server
        share = (0.25 if train.gradient_checkpointing else 1.0) * train.token_budget / 16384
        trainer = {"weights": weights if lora else 2 * weights, "activations": activations * share, "context": 0.5}
        if lora and lora.quantization:
            trainer["weights"] /= 4
        if lora is None:
            trainer |= {"gradients": 2 * weights, "optimizer": 4 * weights}
        parts = {"weights": weights / (2 if server.quantization == "fp8" else 1), "context": 0.5}
        least = cache * server.max_num_seqs / 128 if server.engine == "embedded" else cache
        beside = {"by_nccl": int(1.5 * GIB), "backup": int(14 * GIB)}
        return Need(_bytes(trainer), ServerMemory(_bytes(parts), 2**16, 0, int(least * GIB), **beside))

    return figures


def _bytes(sizes: dict[str, float]) -> dict[str, int]:
    return {name: int(size * GIB) for name, size in sizes.items()}


def chosen(asked: Recipe, machine: Machine, figures: Callable[..., Need] | None = None) -> Plan:
    plan = choose(asked, machine, figures or estimate())[-1]
    assert plan.fits, plan.worst
    return plan


def advice(asked: Recipe, machine: Machine, figures: Callable[..., Need]) -> SettingError:
    tried = choose(asked, machine, figures)
    assert not tried[-1].fits
    return refusal(asked, tried, machine, figures)


def test_one_gpu_is_split_and_vllm_takes_what_the_trainer_leaves() -> None:
    plan = chosen(recipe(placement={"gpu_memory_gib": None}), gpus(24))
    assert plan.mode == "split"
    # 24 less the trainer's 10.5, a margin of 5 %, and the server's context, which vLLM's share does not include
    assert plan.utilization == pytest.approx((24 * 0.95 - 10.5 - 0.5) / 24, abs=1e-4)
    assert (plan.utilization * 24 + 0.5) * GIB <= 24 * GIB * (1 - MARGIN) - sum(plan.need.trainer.values()) + 8
    assert plan.sums[0].total == pytest.approx(24 * GIB, abs=2)
    assert rows(plan)["server"]["KV cache"] == pytest.approx((24 * 0.95 - 10.5 - 6.5) * GIB, abs=2)


def test_what_other_processes_have_taken_is_not_planned_with() -> None:
    plan = chosen(recipe(placement={"gpu_memory_gib": None}), gpus(22))
    assert plan.utilization == pytest.approx((22 - 1.2 - 10.5 - 0.5) / 24, abs=1e-4)
    assert "22.0 GiB of it free" in plan.devices
    assert not choose(recipe(placement={"mode": "split", "gpu_memory_gib": None}), gpus(19), estimate())[-1].fits
    # a larger GPU is used as the recipe plans
    plan = chosen(recipe(), gpus(80, total=80))
    assert plan.utilization == pytest.approx((24 * 0.95 - 10.5 - 0.5) / 80, abs=1e-4)


def test_without_a_gpu_the_recipes_own_is_planned_and_nothing_is_told_to_vllm() -> None:
    plan = chosen(recipe(), NO_GPU)
    assert (plan.mode, plan.utilization, plan.trainer_gpus) == ("split", None, ())
    assert plan.sums[0].room == 24 * GIB


def test_two_gpus_are_separate_and_the_last_is_the_servers() -> None:
    plan = chosen(recipe(placement={"gpu_memory_gib": None}), gpus(24, 24))
    assert (plan.mode, plan.trainer_gpus, plan.server_gpus) == ("separate", (0,), (1,))
    assert plan.utilization is None, "vLLM's default"
    assert rows(plan)["server"]["KV cache"] == pytest.approx((24 * 0.92 - 6.0) * GIB, abs=2)
    held = chosen(recipe(), gpus(80, 80, total=80))
    assert held.utilization == pytest.approx(24 * 0.92 / 80, abs=2e-4), "no more than the recipe plans"


def test_what_does_not_fit_together_takes_turns() -> None:
    plan = chosen(recipe(), NO_GPU, estimate(weights=12))
    assert plan.mode == "time_share"
    training, acting, aside = plan.sums
    assert aside.room is None, "the machine that will have the GPU may be another one"
    # of a sleeping server and an offloaded trainer the contexts stay
    assert training.terms["sleeping server"] == acting.terms["offloaded trainer"] == 0.5 * GIB
    assert training.total == pytest.approx((16.5 + 0.5 + 1.2) * GIB, abs=2)
    assert acting.total == pytest.approx(24 * GIB, abs=2)
    on_gpu = chosen(recipe(), gpus(24), estimate(weights=12))
    assert on_gpu.utilization == pytest.approx((24 * 0.95 - 0.5 - 0.5) / 24, abs=1e-4)
    assert on_gpu.sums[2].terms == {"offloaded trainer": 12 * GIB, "sleeping server": 14 * GIB}


def test_chains_that_run_ahead_cannot_take_turns() -> None:
    error = advice(recipe(rollout={"max_staleness": 1}), NO_GPU, estimate(weights=12))
    said = "trainer 16.50 + server 14.50 + margin 1.20 = 32.20 of 24.00 GiB together"
    assert error.problem == f"does not fit, split: a GPU of 24.0 GiB: {said}"
    assert error.fix.startswith("placement.mode=time_share rollout.max_staleness=0: then ")


def test_the_nearest_change_is_the_mildest_that_fits() -> None:
    split = {"mode": "split"}
    for activations, fix in (
        # 24 - 1.2 of margin - 8.5 of the server - 6.5 of the trainer: 7.8 for activations
        (10, "train.token_budget=8192: "),
        (20, "train.token_budget=4096: "),
        (31, "train.token_budget=4096: then 23.95 of 24.00 GiB"),
        # a row has 4096 tokens: below that nothing is gained
        (31.5, "train.token_budget=8192 train.gradient_checkpointing=true: then 20.14 of 24.00 GiB"),
    ):
        assert advice(recipe(placement=split), NO_GPU, estimate(activations=activations)).fix.startswith(fix)
    shorter = recipe(placement=split, train={"token_budget": 4096})
    assert advice(shorter, NO_GPU, estimate(weights=10)).fix.startswith("placement.mode=time_share: ")
    turns = recipe(placement={"mode": "time_share"}, train={"token_budget": 4096, "gradient_checkpointing": True})
    assert advice(turns, NO_GPU, estimate(weights=21)).fix.startswith("server.quantization=fp8: ")
    full = recipe(placement={"mode": "time_share"}, model={"lora": None}, sync={"backend": "ipc"})
    assert advice(full, NO_GPU, estimate()).fix.startswith('"model.lora={rank: 16}" sync.backend=auto: ')


def test_several_changes_together_and_none_that_helps() -> None:
    full = recipe(model={"lora": None})
    fix = advice(full, NO_GPU, estimate(weights=24)).fix
    assert fix.startswith('server.quantization=fp8 "model.lora={rank: 16, quantization: nf4}": then ')
    error = advice(full, NO_GPU, estimate(weights=100))
    assert error.problem.count("does not fit") == 2, "split and time_share"
    assert error.fix.startswith("a smaller model, or a larger or additional GPU: even with ")
    embedded = recipe(server={"engine": "embedded"}, placement={"mode": "split"}, train={"token_budget": 4096})
    assert advice(embedded, NO_GPU, estimate(cache=24)).fix.startswith("server.max_num_seqs=32: then 21.20 ")
    turns = recipe(server={"engine": "embedded"}, placement={"mode": "time_share"})
    assert advice(turns, NO_GPU, estimate(cache=24)).fix.startswith("server.max_num_seqs=64: ")


def test_a_share_that_the_recipe_sets_is_held_to_the_table() -> None:
    plan = chosen(recipe(server={"options": {"gpu_memory_utilization": 0.45}}), gpus(24))
    assert plan.utilization is None, "the recipe's stands"
    assert rows(plan)["server"]["KV cache"] == pytest.approx((0.45 * 24 - 6.0) * GIB, abs=2)
    too_much = recipe(server={"options": {"gpu_memory_utilization": 0.9}}, placement={"mode": "split"})
    fix = advice(too_much, gpus(24), estimate()).fix
    assert fix.startswith("server.options.gpu_memory_utilization=null: then 20.20 of")
    with pytest.raises(SettingError, match=r"got 0\.3, which is 7\.20 GiB, but with the smallest .* needs 8\.00 GiB"):
        choose(recipe(server={"options": {"gpu_memory_utilization": 0.3}}), gpus(24), estimate())


def test_weights_go_by_the_fastest_way_that_there_is() -> None:
    small = estimate(weights=1, activations=1)
    full, two = {"lora": None}, Machine((Gpu(24 * GIB, 24 * GIB),) * 2, 64 * GIB, 60 * GIB, has_vllm=True)
    assert chosen(recipe(model=full), gpus(24), small).sync == "ipc"
    plan = chosen(recipe(model=full), two, small)
    assert plan.sync == "nccl"
    # vLLM is told a share that leaves room for what arrives
    assert rows(plan)["server"]["transfer"] == 1.5 * GIB
    assert plan.utilization == pytest.approx((24 * (1 - MARGIN) - 1.5 - 0.5) / 24, abs=1e-3)
    assert plan.sums[1].total <= plan.sums[1].room
    for other, machine in (
        (recipe(), two),
        (recipe(model=full, sync={"backend": "file"}), two),
        (recipe(model=full, server={"engine": "embedded"}), two),
        (recipe(model=full), gpus(24, 24)),
    ):
        plan = chosen(other, machine, small)
        assert (plan.sync, plan.transfer) == (None, 0)
    asked = chosen(recipe(model=full, sync={"backend": "nccl"}), gpus(24, 24), small)
    assert (asked.sync, asked.transfer) == (None, 1.5 * GIB)


def test_gpus_that_are_not_there() -> None:
    many = recipe(train={"processes": 7, "strategy": "fsdp2"}, placement={"gpu_memory_gib": 80})
    plan = chosen(many, NO_GPU)
    assert plan.mode == "separate"
    assert "7 GPUs of 80.0 GiB for the trainer, a GPU of 80.0 GiB for the server" in plan.devices
    assert chosen(many, gpus(*[80] * 8, total=80)).trainer_gpus == tuple(range(7))
    # of hsdp's 16 processes, this machine has a share
    across = recipe(train={"processes": 16, "strategy": "hsdp"}, server={"url": "http://elsewhere:8000"})
    alone = chosen(across, gpus(*[80] * 8, total=80), lambda *asked: replace(estimate()(*asked), server=None))
    assert alone.devices == "8 GPUs of 24.0 GiB for the trainer"
    with pytest.raises(SettingError, match="needs 7 and the server 1 separate GPUs, but there are 4") as caught:
        choose(many, gpus(*[80] * 4, total=80), estimate())
    assert caught.value.field == "placement.mode"
    for told, machine, sections in (
        ("split or time_share", gpus(24), {"placement": {"mode": "separate"}}),
        ("needs separate GPUs", gpus(24), {"model": {"lora": None}, "sync": {"backend": "nccl"}}),
        ("separate GPUs", gpus(24, 24), {"model": {"lora": None}, "sync": {"backend": "ipc"}}),
    ):
        with pytest.raises(SettingError, match=told):
            choose(recipe(**sections), machine, estimate())


def test_on_a_cpu_everything_stands_in_one_memory() -> None:
    here = Machine((), 32 * GIB, 24 * GIB)
    asked = {"placement": {"mode": "split", "gpu_memory_gib": None}, "server": {"engine": "embedded"}}
    plan = chosen(recipe(**asked), here)
    assert plan.sums[0].terms["trainer"] == 10.5 * GIB
    assert plan.sums[0].room == 24 * GIB
    turns = {**asked, "placement": {"mode": "time_share", "gpu_memory_gib": None}}
    training, acting = chosen(recipe(**turns), here).sums
    assert training.terms["sleeping server"] == 6.5 * GIB, "all but the cache"
    assert acting.terms["offloaded trainer"] == 6.5 * GIB, "the weights and the libraries"


@pytest.mark.parametrize("file", sorted(SHAPES.glob("*.json")), ids=lambda file: file.stem)
def test_the_shapes_of_our_recipes_models_need_no_network(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config, note = load_config(file.stem.replace("--", "/"))
    assert "hub cannot be reached" in str(note)
    network = meta_network(config, torch.bfloat16, whole=True)
    billions = {"0.5B": 0.494, "3B": 3.09, "4B": 4.02, "7B": 7.62, "8B": 8.19, "9B": 8.95}
    billions |= {"VL-4B": 4.44, "VL-7B": 8.29, "VL-8B": 8.77}
    size = max((size for size in billions if size in file.stem), key=len)
    assert network.num_parameters() / 1e9 == pytest.approx(billions[size], abs=0.01)


@pytest.mark.parametrize(
    ("settings", "field", "fix"),
    [
        ("mode=split train.processes=2 train.strategy=ddp", "train.processes", "placement.mode=separate"),
        ("mode=time_share rollout.max_staleness=1", "rollout.max_staleness", "use 0"),
        ("mode=split sync.backend=nccl", "sync.backend", "use auto, ipc or file"),
        ("mode=separate sync.backend=ipc", "sync.backend", "file or nccl"),
    ],
)
def test_refused_anywhere(project: Path, settings: str, field: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # that vLLM is installed nowhere here is another check's business
    monkeypatch.setattr("agentfactory.rollout.inference.server_command_line.missing_from", lambda *_: None)
    assert refused(fix, "server.engine=vllm", *f"placement.{settings}".split()).field == field


def test_what_may_not_fit_is_tried_where_the_recipe_says_so() -> None:
    split = {"mode": "split", "gpu_memory_gib": None}
    unfit = plan_for(recipe(placement=split), gpus(18), estimate())
    _, problem, fix = unfit["refused"]
    assert fix.endswith(" GiB; or placement.on_misfit=warn, to try it anyway")
    assert "gpu_memory_utilization" not in unfit
    asked = recipe(placement={**split, "on_misfit": "warn"})
    tried = plan_for(asked, gpus(18), estimate())
    assert "refused" not in tried
    assert tried["warning"].startswith(f"{problem}; to make it fit: ")
    assert tried["trainer_bytes"] == 0, "nothing is held to a table that is not believed"
    assert tried["gpu_memory_utilization"] == pytest.approx(8.0 / 24, abs=1e-4), "the smallest cache"
    huge = plan_for(asked, gpus(18), estimate(weights=40))
    assert huge["gpu_memory_utilization"] == int(17.5 / 24 * 1e4) / 1e4, "what is free"
    assert "warning" not in plan_for(asked, gpus(24), estimate())


def test_what_the_processes_are_told(project: Path) -> None:
    asked = load_and_check()
    placement = Placement(mode="split", on_gpu=True, trainer_devices="0", gpu_memory_utilization=0.4, sync="ipc")
    told = placement.for_trainer(asked)
    assert (told.placement.mode, told.sync.backend) == ("split", "ipc")
    assert placement.weight_transfer(asked) == "ipc"
    command = placement.server_command(updated(asked, "server", engine="vllm"))
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.4"
    assert placement.environment("trainer") == {"CUDA_VISIBLE_DEVICES": "0"}
    assert placement.environment("server") == {}
    assert Placement().weight_transfer(asked) == "file"


@pytest.mark.extended
@pytest.mark.processes
def test_a_dry_run_ends_with_the_tables_and_what_does_not_fit_is_refused(project: Path, agentfactory: Command) -> None:
    # a configuration without weights
    Qwen3Config(**sizes(256, 512, 4, 4, 2, 1000), head_dim=64).save_pretrained(project / "model")
    (project / "first.yaml").write_text((project / "recipe.yaml").read_text() + "placement: {gpu_memory_gib: 24}\n")
    (project / "both.yaml").write_text("stages: [first.yaml, recipe.yaml]\n")
    before = sorted(project.rglob("*"))
    # the second stage's model is made by the first, and has its shape
    small = ["recipe.placement={mode: split, gpu_memory_gib: 3.2}", "recipe.train.gradient_checkpointing=true"]
    result = agentfactory("train", "both.yaml", "--dry-run", *small)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert yaml.safe_load(result.stdout)["stages"][0]["placement"]["gpu_memory_gib"] == 24.0
    said = [line for line in result.stdout.splitlines() if line.startswith("#") and not line.startswith("# warning: ")]
    assert said[:2] == ["# first: new, in runs/both/first", "# first: memory by estimate, split: a GPU of 24.0 GiB"]
    assert "# recipe: memory by estimate, split: a GPU of 3.2 GiB" in said
    names = {line.removeprefix("# ").split("  ")[0] for line in said}
    assert {"weights", "gradients", "optimizer", "activations (16,384 tokens)", "KV cache", "context", "total"} <= names
    told = "agentfactory: recipe: placement.mode: does not fit, split: a GPU of 3.2 GiB: trainer "
    assert re.match(f"{told}.* of 3.20 GiB together; fix: server.max_num_seqs=", result.stderr)
    assert sorted(project.rglob("*")) == before


def test_what_does_not_fit_is_refused_and_nothing_is_written(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfit = Placement(table="the table", refused=("placement.mode", "does not fit", "a smaller model"))
    monkeypatch.setattr(plan, "place", lambda recipes, *_: [unfit] * len(recipes))
    assert refused_by_launcher(project, load_and_check(), "does not fit; fix: a smaller model") == ["the table"]


def refused_by_launcher(project: Path, asked: Any, told: str) -> list[str]:
    """What the launcher says before it refuses to train, having written nothing."""
    before, said = sorted(project.rglob("*")), []
    with pytest.raises(SettingError, match=told):
        launcher.train(asked, False, None, said.append)
    assert sorted(project.rglob("*")) == before
    return said


@pytest.mark.processes
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("placement.mode=time_share", "placement.mode: 'time_share': vLLM sleeps on GPUs only"),
        ("sync.backend=ipc", "sync.backend: got 'ipc': vLLM has it on GPUs only"),
    ],
)
@pytest.mark.parametrize("is_there", [True, False], ids=["model", "no model yet"])
def test_what_vllm_does_on_gpus_only_is_refused_before_anything_is_written(
    project: Path, monkeypatch: pytest.MonkeyPatch, setting: str, told: str, is_there: bool
) -> None:
    asked = load_and_check(overrides=["server.engine=vllm", setting], lacks=[])
    planned = Placement(mode="time_share" if asked.placement.mode == "time_share" else "separate")
    monkeypatch.setattr(plan, "place", lambda recipes, *_: [planned if is_there else None] * len(recipes))
    monkeypatch.setattr(plan, "may_have_gpu", lambda: False)
    first = load_and_check(overrides=["name=first"])
    whole = StagedRecipe(name="whole", output=project / "runs" / "whole", stages=[first, asked])
    (project / "model" / "config.json").write_text("{}")
    refused_by_launcher(project, whole, told)


@pytest.mark.processes
def test_hsdp_is_refused_on_one_machine(project: Path) -> None:
    across = load_and_check(overrides=["train.strategy=hsdp", "train.processes=4"], lacks=[])
    refused_by_launcher(project, across, "train.strategy: got 'hsdp', and this command trains on one machine")


def test_a_trainer_or_a_server_alone_has_its_own_table() -> None:
    def without(part: str) -> Callable[..., Need]:
        return lambda *asked: replace(estimate()(*asked), **{part: {} if part == "trainer" else None})

    asked = recipe(placement={"gpu_memory_gib": None})
    plan = chosen(asked, gpus(24), without("server"))
    assert table(plan, asked).startswith("memory by estimate, a GPU of 24.0 GiB for the trainer\n")
    assert (list(rows(plan)), plan.trainer_gpus) == (["trainer"], ())
    plan = chosen(asked, gpus(24), without("trainer"))
    assert (list(rows(plan)), plan.utilization) == (["server"], None)
    # beside a desktop vLLM would not start with its default
    occupied = chosen(asked, gpus(20), without("trainer"))
    assert occupied.utilization == pytest.approx((20 - 1.2 - 0.5) / 24, abs=1e-4)
    with pytest.raises(SettingError, match="needs 2 GPUs, but there are 1 here"):
        choose(recipe(train={"processes": 2, "strategy": "ddp"}), gpus(24), without("server"))
    # a server that runs already has the GPU's memory, and will sleep when the trainer comes
    turns = recipe(placement={"mode": "time_share", "gpu_memory_gib": None})
    assert chosen(turns, gpus(2), without("server")).sums[0].room == 24 * GIB


@pytest.mark.parametrize("mode", ["split", "time_share"])
def test_the_table_follows_vllms_formulas(mode: str) -> None:
    """The figures of docs/placement.md: Qwen2.5-3B, rank 32, bfloat16, 23.6 GiB. Names are those of vLLM 0.32."""
    hidden, inner, vocabulary, layers, mib = 2048, 11008, 151936, 36, 2**20
    # Qwen2DecoderLayer: qkv_proj and its bias, o_proj, gate_up_proj, down_proj, two norms; keys have 2 heads of 128
    layer = [(hidden + 512) * hidden, hidden + 512, hidden**2, 2 * inner * hidden, inner * hidden, hidden, hidden]
    weights = 2 * (vocabulary * hidden + layers * sum(layer) + hidden)
    # BaseLinearLayerWithLoRA.create_lora_weights: A and B of 4 slots for q, k, v, o, gate, up and down
    small, large = 4 * 32 * 2 * (9 * hidden + 2 * 256), 4 * 32 * 2 * 3 * inner
    counts = 128 * vocabulary * 4  # PenaltiesState.output_bin_counts; also the buffer of apply_top_k_top_p_triton
    # GPUModelRunner.profile_run of 2048 tokens; Sampler.apply_sampling_params copies the logits of 128 sequences
    step = max(2048 * (4 * hidden + 3 * inner) * 2, 128 * vocabulary * (2 + 4))
    lora = {"adapters": layers * (small + large), "graphs": 2 * 512 * mib}
    parts = {"weights": weights, "workspace": 2 * counts + step, **lora}
    config = Qwen2Config(**sizes(hidden, inner, layers, 16, 2, vocabulary), tie_word_embeddings=True)
    asked = recipe(model={"path": "x", "lora": {"rank": 32}}, placement={"mode": mode, "gpu_memory_gib": None})
    server, trainer = server_memory(asked, config, "cuda"), _bytes({"weights": 9.5, "context": 0.5})
    assert server.parts == parts | {"context": 512 * mib}
    plan = chosen(asked, gpus(23.6, total=23.6), lambda *_: Need(trainer, server))
    # request_memory; Worker.determine_available_memory; blocks of 16 tokens as in get_kv_cache_config_from_groups
    requested, block = math.ceil(int(23.6 * GIB) * (plan.utilization or 0.0)), 16 * layers * 2 * 2 * 128 * 2
    assert plan.cache // block - (requested - sum(parts.values())) // block in range(6)
    # the context exists before init_snapshot, and is beside the requested memory
    used = requested + 512 * mib + (10 if mode == "split" else 0.5) * GIB
    assert 0 <= 23.6 * 0.95 * GIB - used < 3 * mib
    # CuMemAllocator.sleep, in powers of two: embedding; qkv, gate_up and down; counts; 20 MiB segments with two o_proj
    # and one of the large halves of adapters each, and those with seven of the other halves
    backup = mib * (1024 + layers * (16 + 128 + 64) + 128 + 32 * (18 + math.ceil((3 * layers - 18) / 7)))
    assert server.backup == pytest.approx(backup + layers * small, rel=0.02)
    assert plan.sums[0].terms.get("sleeping server", 1536 * mib) == 1536 * mib, "graphs and context"

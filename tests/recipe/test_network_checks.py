"""Options of the network and its optimiser that cannot be had, or would do nothing, are refused with the fix."""

import importlib.util
from pathlib import Path

import pytest

from agentfactory import Agent
from agentfactory.base.errors import SettingError
from agentfactory.recipe.load import load_recipe

FSDP2 = ["train.strategy=fsdp2", "train.processes=2"]
NF4 = "model.lora={rank: 8, quantization: nf4}"
REFUSED = {
    "four bits in shares": ([*FSDP2, NF4], "model.lora.quantization", "use ddp"),
    "muon on cut matrices": ([*FSDP2, "train.optimizer.name=muon"], "train.optimizer.name", "use adamw or sgd"),
    "adafactor on cut matrices": ([*FSDP2, "train.optimizer.name=adafactor"], "train.optimizer.name", "strategy ddp"),
    "flash attention in float32": (
        ["train.attention=flash_attention_2", "model.dtype=float32"],
        "train.attention",
        "use sdpa, or bfloat16",
    ),
    "flash attention on a tree": (
        ["model.dtype=bfloat16", "train.attention=flash_attention_2", "train.batching=tree"],
        "train.attention",
        "batching packed",
    ),
    "eager on packed rows": (["train.attention=eager", "train.batching=packed"], "train.attention", "use sdpa"),
    "an adapter on the head": (
        ["model.lora={rank: 8, target_modules: [q_proj, lm_head]}"],
        "model.lora.target_modules",
        r"write \[q_proj\]; or train all weights",
    ),
    "an adapter on embeddings": (
        ["model.lora={rank: 8, target_modules: [model.embed_tokens]}"],
        "model.lora.target_modules",
        "use all-linear; or",
    ),
    "adapters on everything": (["model.lora={rank: 8, target_modules: '.*'}"], "model.lora.target_modules", "layers"),
    "no pattern": (["model.lora={rank: 8, target_modules: '['}"], "model.lora.target_modules", "a list of names"),
    "no bitsandbytes for the base": ([NF4], "model.lora.quantization", "pip install bitsandbytes"),
    "no bitsandbytes for the optimiser": (
        ["train.optimizer.name=lion"],
        "train.optimizer.name",
        "pip install bitsandbytes",
    ),
    "no liger-kernel": (["train.liger=true"], "train.liger", "pip install liger-kernel"),
    "no torchao": (["train.precision=fp8"], "train.precision", "pip install torchao"),
    "FP8 on four bits": ([NF4, "train.precision=fp8"], "train.precision", "model.lora.quantization=null"),
    "8-bit moments in shares": (
        [*FSDP2, "train.optimizer.name=adamw_8bit"],
        "train.optimizer.name",
        "use adamw or sgd, or strategy ddp",
    ),
    "no flash attention": (
        ["model.dtype=bfloat16", "train.attention=flash_attention_2"],
        "train.attention",
        "pip install flash-attn",
    ),
    "betas of adafactor": (
        ["train.optimizer={name: adafactor, betas: [0.8, 0.9]}"],
        "train.optimizer.betas",
        "another optimizer",
    ),
    "eps of sgd": (["train.optimizer={name: sgd, eps: 1e-6}"], "train.optimizer.eps", "adamw"),
    "decay of a cosine": (["train.schedule=cosine", "train.decay_steps=3"], "train.decay_steps", "schedule=wsd"),
    "an adapter that vLLM drops": (
        ["server={engine: vllm}", "model.lora={rank: 8}", "train.vision=trained"],
        "train.vision",
        "--enable-tower-connector-lora",
    ),
    "wsd without decay": (["train.schedule=wsd"], "train.decay_steps", "after the warm-up"),
}


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the packages that only some options need."""
    find = importlib.util.find_spec
    optional = ("bitsandbytes", "liger_kernel", "flash_attn", "torchao")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in optional else find(name))


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("case", REFUSED)
def test_refused(project: Path, case: str) -> None:
    overrides, field, fix = REFUSED[case]
    with pytest.raises(SettingError, match=fix) as caught:
        load_recipe("recipe.yaml", overrides, purpose="train")
    assert caught.value.field == field


LORA = "model.lora.rank=8"
UNCORRECTED = "train.loss.mismatch.correction=none"
SERVED_APART = {
    "fp8 by the embedded engine": ([LORA, "server.quantization=fp8"], "server.quantization", "engine=vllm"),
    "int4 by vLLM": (
        [LORA, "server.engine=vllm", "server.quantization=int4"],
        "server.quantization",
        "engine=embedded",
    ),
    "full weights into rounded ones": (["server.quantization=int8"], "server.quantization", "train an adapter"),
    "full weights into a copy": (["server.model=org/Model-AWQ"], "server.model", "train an adapter"),
    "uncorrected, rounded": (
        [LORA, UNCORRECTED, "server.quantization=int8"],
        "train.loss.mismatch.correction",
        "use token_truncate",
    ),
    "uncorrected, a copy": (
        [LORA, UNCORRECTED, "server.model=org/Model-AWQ"],
        "train.loss.mismatch.correction",
        "use token_truncate",
    ),
    "uncorrected, FP8 in the trainer": (
        ["train.precision=fp8", UNCORRECTED],
        "train.loss.mismatch.correction",
        "use token_truncate",
    ),
    "uncorrected, four bits in the trainer": (
        [NF4, UNCORRECTED],
        "train.loss.mismatch.correction",
        "use token_truncate",
    ),
}


@pytest.mark.parametrize("case", SERVED_APART)
def test_a_server_that_no_weights_or_no_correction_fits_is_refused(project: Path, case: str) -> None:
    overrides, field, fix = SERVED_APART[case]
    with pytest.raises(SettingError, match=fix) as caught:
        load_recipe("recipe.yaml", overrides, purpose="train")
    assert caught.value.field == field


def test_an_agent_s_own_server_refuses_it_too() -> None:
    with pytest.raises(ValueError, match=r"server.quantization: got 'fp8', but the embedded engine supports only int8"):
        Agent("org/model", engine="embedded", server={"quantization": "fp8"})


@pytest.mark.parametrize(
    "overrides",
    [
        [LORA, "server.quantization=int4"],
        [LORA, "server.model=org/Model-AWQ", "train.loss.mismatch.correction=token_mask"],
        [NF4],
        [NF4, "server.quantization=int8", "train.strategy=ddp", "train.processes=2"],
        [LORA, UNCORRECTED],
        # nothing is sampled
        [NF4, "train.algorithm=sft", "data.path=talks.jsonl"],
        [*FSDP2, "model.lora.rank=8", "train.gradient_checkpointing=offload"],
        [*FSDP2, "train.compile=true", "train.optimizer.name=sgd"],
        ["train.optimizer={name: muon, eps: 1e-6, betas: [0.95, 0.99]}", "train.attention=flex_attention"],
        ["train.schedule=wsd", "train.warmup_steps=3", "train.decay_steps=7"],
        ["train.optimizer={groups: [{match: embed, learning_rate: 1e-6}, {match: norm, weight_decay: 0.1}]}"],
    ],
)
def test_accepted(project: Path, overrides: list[str]) -> None:
    (project / "talks.jsonl").write_text('{"messages": [{"role": "assistant", "content": "2"}]}\n')
    load_recipe("recipe.yaml", overrides, purpose="train")


def test_chains_longer_than_the_models_positions_allow(project: Path) -> None:
    config = project / "model" / "config.json"
    config.write_text('{"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}')
    with pytest.raises(SettingError, match=r"got 8192: with longrope .*_len=4096 and rollout") as caught:
        load_recipe("recipe.yaml", ["server.max_model_len=8192"], purpose="train")
    assert caught.value.field == "server.max_model_len"
    short = ["server.max_model_len=4096", "rollout.max_total_tokens=4096"]
    load_recipe("recipe.yaml", short, purpose="train")
    # a teacher reads chains, and is on another server
    (project / "teacher").mkdir()
    (project / "teacher" / "config.json").write_text(config.read_text())
    config.write_text("{}")
    taught = ["server.max_model_len=8192", "teacher.model=teacher"]
    load_recipe("recipe.yaml", [*taught, "rollout.max_total_tokens=4096"], purpose="train")
    with pytest.raises(SettingError, match=r"rollout.max_total_tokens: got 8192: .*; fix: use rollout.max_total_token"):
        load_recipe("recipe.yaml", [*taught, "rollout.max_total_tokens=8192"], purpose="train")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"rope_scaling": "dynamic"}',
        '{"rope_scaling": {"type": 3}}',
        '{"rope_scaling": {"type": "dynamic"}}',
    ],
)
def test_a_damaged_configuration_is_named_when_the_model_is_loaded(project: Path, text: str) -> None:
    (project / "model" / "config.json").write_text(text)
    load_recipe("recipe.yaml", ["server.max_model_len=8192"], purpose="train")


def test_a_variable_of_accelerate_is_refused_with_the_recipe(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    with pytest.raises(SettingError, match=r"ACCELERATE_DYNAMO_BACKEND: got 'inductor' .*, set train.compile$"):
        load_recipe("recipe.yaml", [], purpose="train")
    load_recipe("recipe.yaml", [], purpose="eval")

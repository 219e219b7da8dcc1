"""Settings that cannot work together, or would do nothing, are refused with the fix; their neighbours are accepted."""

import importlib.util
import re
import sys
from pathlib import Path
from string import Template

import pytest

from agentfactory.trainers.config import ALGORITHMS
from tests.project import load_and_check, refused

GIGPO = "train.advantage.estimator=gigpo; train.advantage.options.anchors=observation"
TEACHER = "teacher.model=Qwen/Qwen2.5-7B-Instruct"
URL = "teacher.url=http://127.0.0.1:8100"
FSDP2 = "train.strategy=fsdp2; train.processes=2"
NF4 = "model.lora={rank: 8, quantization: nf4}"
UNCORRECTED = "train.loss.mismatch.correction=none"
ATTACH = "server.options.attach=http://127.0.0.1:30000"
OUTSIDE = "rollout.agent={name: outside, options: {port: 8100}}"
SHORT = {name: value for name, value in globals().items() if name.isupper()} | {"PYTHON": sys.executable}


def table(text: str) -> list[tuple[str, ...]]:
    """Settings, the field that is named, and a part of what is said of it, in lines `SETTINGS -> FIELD: SAID`."""
    lines = Template(text.replace("->\n ", "->").strip()).substitute(SHORT).splitlines()
    return [tuple(re.fullmatch(r"(.*) -> +(\S+): (.*)", line).groups()) for line in lines]


REFUSED = table(r"""
train.loss.kl.coefficient=0.1; train.loss.kl.estimator=k1 -> train.loss.kl.estimator: use k2 or k3, or place: reward
train.loss.kl.coefficient=0.1; train.loss.kl.place=reward -> train.loss.kl.place: reinforce_pp or gae
train.loss.kl.estimator=k2 -> train.loss.kl.estimator: kl.coefficient > 0
train.loss.mismatch={correction: token_mask, options: {low: 3}} -> train.loss.mismatch.options.low: lower it
train.loss.mismatch.options.low=0.1 -> train.loss.mismatch.options.low: token_mask
train.loss.mismatch.correction=geometric_mask -> train.loss.mismatch.options: low: 0.99, high: 1.01
train.optimizer.groups=[{match: '['}] -> train.optimizer.groups.0.match: regular expression
train.overlong={buffer: 1, penalty: 1e308} -> train.overlong.penalty: less than
rollout.group_size=1; rollout.equal_rewards=drop; train.algorithm=reinforce_pp -> rollout.equal_rewards: use keep
model.lora={rank: 4, dropout: 0.1} -> model.lora.dropout: use 0
train.algorithm=gigpo -> train.advantage.estimator: anchors=observation
train.algorithm=ppo; train.advantage.estimator=grpo -> train.algorithm: use grpo, or remove advantage.estimator
$GIGPO; train.advantage.options.scale=batch -> train.advantage.options.scale: use none or group
train.advantage.options.step_weight=0.5 -> train.advantage.options.step_weight: remove it
train.algorithm=distill -> teacher: set teacher.model
teacher.context=hint -> teacher.context: answer, errors, or FILE
teacher={context: answer, divergence: reverse_kl} -> teacher.divergence: set teacher.top_k: 64
teacher.context=errors; rollout.context.policy=truncate -> rollout.context.policy: use keep
teacher.context=errors; rollout.agent={command: [python], options: {sandbox: none}} ->
    teacher.context: use the recipe's tools without an agent
teacher.context=solution; train.algorithm=distill; rewards=[]; eval.data=null -> rewards: name FILE.py:NAME of a @reward
$TEACHER; train.algorithm=sft; data.path=talks.jsonl -> teacher: use train.algorithm=distill
teacher.coefficient=0.5 -> teacher.model: its server by teacher.url
$TEACHER; teacher.api_key_env=KEY -> teacher.api_key_env: set teacher.url
$URL; teacher.divergence=forward_kl -> teacher.top_k: teacher.top_k: 64
$URL; rollout.temperature=0.7 -> rollout.temperature: use 1
$URL; train.algorithm=distill; train.from_trajectories=recipe.yaml -> teacher.url: use teacher.model
$URL; server.url=http://127.0.0.1:8100/ -> teacher.url: train an adapter
$TEACHER; teacher.options.beta=0.3 -> teacher.options.beta: remove it
$TEACHER; teacher.divergence=forward_kl; $FSDP2 -> teacher.divergence: use sampled, or strategy ddp
train.stop_when=[format, success]; data.shuffle=false ->
    train.stop_when: got 'success', which is not reported with data.shuffle=false
$TEACHER; train.algorithm=distill; train.loss.top_entropy=0.2 -> train.loss.top_entropy: remove it
train.algorithm=cispo; train.loss.options.clip_low=0.1 -> train.loss.options.clip_low: gspo
model.lora.rank=8; server.quantization=fp8 -> server.quantization: engine=vllm
server.quantization=int8 -> server.quantization: train an adapter
model.lora.rank=8; $UNCORRECTED; server.quantization=int8 -> train.loss.mismatch.correction: use token_truncate
train.precision=fp8; $UNCORRECTED -> train.loss.mismatch.correction: use token_truncate
$OUTSIDE; rollout.workers=2 -> rollout.workers: outside programs take tasks at one address; fix: use 1
rollout.agent={name: outside, options: {workspace: desk}} -> rollout.agent.options.workspace: command has it
rollout.agent={name: outside, command: [x]} -> rollout.agent: set one of name and command
rollout.agent={command: [x], options: {sandbox: none, disk_mb: 9}} -> rollout.agent.options.disk_mb: with sandbox=none
rewards=[] -> rewards: no environment gives a reward
""")
NETWORK = table(r"""
$FSDP2; $NF4 -> model.lora.quantization: use ddp
train.attention=flash_attention_2; model.dtype=float32 -> train.attention: use sdpa, or bfloat16
model.dtype=bfloat16; train.attention=flash_attention_2; train.batching=tree -> train.attention: batching packed
model.lora={rank: 8, target_modules: [q_proj, lm_head]} ->
    model.lora.target_modules: use all-linear, or train all weights
model.lora={rank: 8, target_modules: '.*'} -> model.lora.target_modules: layers
$NF4 -> model.lora.quantization: pip install bitsandbytes
train.precision=fp8 -> train.precision: pip install torchao
$NF4; train.precision=fp8 -> train.precision: model.lora.quantization=null
train.optimizer={name: adafactor, betas: [0.8, 0.9]} -> train.optimizer.betas: another optimizer
train.schedule=cosine; train.decay_steps=3 -> train.decay_steps: schedule=wsd
server={engine: vllm}; model.lora={rank: 8}; train.vision=trained -> train.vision: --enable-tower-connector-lora
""")
SGLANG = table(r"""
model.lora.rank=8 -> model.lora: set model.lora=null, or set server.engine=vllm
rollout.inflight=keep; rollout.max_staleness=1 -> rollout.inflight: remove it
placement.mode=time_share -> placement.mode: use separate
server.options.args=[--api-key, secret] -> server.options.args: remove it
server.options.python=/nowhere/python -> server.options.python: name a Python
server.options.python=$PYTHON -> server.options.python: pip install
server.options.attach=gpu:30000 -> server.options.attach: http://127.0.0.1:30000
$ATTACH; server.url=http://127.0.0.1:1 -> server.options.attach: server.url=null
$ATTACH -> server.engine: use vllm, or a text-only model
""")


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the packages that only some options need."""
    find = importlib.util.find_spec
    optional = ("bitsandbytes", "liger_kernel", "flash_attn", "torchao")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in optional else find(name))


@pytest.fixture(autouse=True)
def conversations(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations for sft, and a token for programs."""
    monkeypatch.setenv("AGENTFACTORY_TOKEN", "for tests")
    (project / "talks.jsonl").write_text('{"messages": [{"role": "assistant", "content": "2"}]}\n')


def refuses(settings: str, field: str, said: str) -> None:
    assert refused(re.escape(said), *settings.split("; ")).field == field


@pytest.mark.parametrize(("settings", "field", "said"), REFUSED)
def test_refused(settings: str, field: str, said: str) -> None:
    refuses(settings, field, said)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(("settings", "field", "said"), NETWORK)
def test_networks_and_missing_packages_are_refused(settings: str, field: str, said: str) -> None:
    refuses(settings, field, said)


@pytest.mark.processes  # asks a Python for its packages
@pytest.mark.parametrize(("settings", "field", "said"), SGLANG)
def test_sglang_refuses(project: Path, settings: str, field: str, said: str) -> None:
    if field == "server.engine":
        (project / "model" / "config.json").write_text('{"vision_config": {}}')
    refuses(f"server.engine=sglang; {settings}", field, said)


@pytest.mark.parametrize(
    "settings",
    [
        "train.algorithm=ppo; train.loss.kl={coefficient: 0.1, estimator: k1, place: reward}",
        "train.loss.mismatch={correction: geometric_mask, options: {low: 0.99, high: 1.01}}",
        TEACHER,
        "teacher.context=solution; train.algorithm=distill; rollout.equal_rewards=refill",
        "teacher={context: errors, divergence: forward_kl, top_k: 8}; train.algorithm=distill; "
        "rewards=[]; eval.data=null",
        f"{TEACHER}; train.algorithm=distill; rewards=[]; eval.data=null; rollout.group_size=1",
        f"{TEACHER}; train.algorithm=distill; teacher={{divergence: jensen_shannon, options: {{beta: 0.1}}}}",
        "train.algorithm=sft; data.path=talks.jsonl",
        "train.algorithm=gigpo; tools=[my_tools.py:Place]",
        *(f"train.algorithm={name}" for name in ALGORITHMS if name not in ("gigpo", "distill", "sft")),
        *(f"{GIGPO}; train.algorithm={name}" for name in ("gigpo", "grpo", "dapo", "gspo", "sapo")),
        "model.lora.rank=8; server.model=org/Model-AWQ; train.loss.mismatch.correction=token_mask",
        NF4,
        f"{NF4}; server.quantization=int8; train.strategy=ddp; train.processes=2",
        f"{NF4}; train.algorithm=sft; data.path=talks.jsonl",
        f"{FSDP2}; model.lora.rank=8; train.gradient_checkpointing=offload",
        "train.optimizer={name: muon, eps: 1e-6, betas: [0.95, 0.99]}; train.attention=flex_attention",
        "train.schedule=wsd; train.warmup_steps=3; train.decay_steps=7",
        "train.optimizer={groups: [{match: embed, learning_rate: 1e-6}, {match: norm, weight_decay: 0.1}]}",
        f"{OUTSIDE}; rewards=[]; rollout.workers=1",
    ],
)
def test_accepted(settings: str) -> None:
    load_and_check(overrides=settings.split("; "))


def test_a_text_model_has_no_vision_to_train(project: Path) -> None:
    load_and_check(overrides=["train.vision=1e-6"])  # nothing is known of the model
    config = project / "model" / "config.json"
    config.write_text('{"model_type": "qwen3"}')
    refused(r"train\.vision: got 1e-06, but .*model accepts only text; fix: remove it", "train.vision=1e-6")
    config.write_text('{"model_type": "omni", "thinker_config": {"vision_config": {}}}')
    load_and_check(overrides=["train.vision=1e-6"])


def test_chains_longer_than_the_models_positions_allow(project: Path) -> None:
    config = project / "model" / "config.json"
    config.write_text('{"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}')
    error = refused(r"got 8192: with longrope .*_len=4096 and rollout", "server.max_model_len=8192")
    assert error.field == "server.max_model_len"
    load_and_check(overrides=["server.max_model_len=4096", "rollout.max_total_tokens=4096"])
    # a teacher reads chains, and is on another server
    (project / "teacher").mkdir()
    (project / "teacher" / "config.json").write_text(config.read_text())
    config.write_text("{}")
    taught = ["server.max_model_len=8192", "teacher.model=teacher"]
    load_and_check(overrides=[*taught, "rollout.max_total_tokens=4096"])
    told = r"rollout.max_total_tokens: got 8192: .*; fix: use rollout.max_total_token"
    refused(told, *taught, "rollout.max_total_tokens=8192")

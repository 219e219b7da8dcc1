"""Settings that cannot work together, or would do nothing, are refused with the fix; their neighbours are accepted."""

import importlib.util
import re
import sys
from pathlib import Path
from string import Template

import pytest

from agentfactory import Agent
from agentfactory.recipe.checks import doubts
from agentfactory.recipe.schema import Recipe
from agentfactory.trainers.config import ALGORITHMS
from tests.project import load_and_check, refused

GIGPO = "train.advantage.estimator=gigpo"
TEACHER = "teacher.model=Qwen/Qwen2.5-7B-Instruct"
URL = "teacher.url=http://127.0.0.1:8100"
FSDP2 = "train.strategy=fsdp2; train.processes=2"
HSDP = "train.strategy=hsdp; train.processes"
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
train.loss.mismatch={correction: none, options: {high: 3}} -> train.loss.mismatch.options.high: correction
train.loss.mismatch.correction=geometric_mask -> train.loss.mismatch.options: low: 0.99, high: 1.01
train.optimizer.betas=[0.9, 1.0] -> train.optimizer.betas.1: less than 1
model.lora={rank: 4, alpha: 0} -> model.lora.alpha: greater than 0
train.overlong={buffer: 1, penalty: 1e308} -> train.overlong.penalty: less than
rollout.outcome_penalty={max_turns: 1e308} -> rollout.outcome_penalty.max_turns: less than
rollout.group_size=1; rollout.equal_rewards=drop; train.algorithm=reinforce_pp -> rollout.equal_rewards: use keep
$GIGPO; train.loss.kl.coefficient=0.1; train.loss.kl.place=reward -> train.loss.kl.place: reinforce_pp or gae
$GIGPO; train.algorithm=ppo -> train.algorithm: use gigpo, or remove
train.algorithm=ppo; train.advantage.estimator=grpo -> train.algorithm: use grpo, or remove advantage.estimator
train.algorithm=gspo; train.loss.policy=cispo -> train.algorithm: use cispo
$GIGPO; train.advantage.options.scale=batch -> train.advantage.options.scale: use none or group
$GIGPO; rollout.group_size=1 -> rollout.group_size: at least 2
train.advantage.options.gamma=0.5 -> train.advantage.options.gamma: remove it
train.algorithm=distill -> teacher: set teacher.model
teacher.model=./nowhere -> teacher.model: hub name
teacher.context=hint -> teacher.context: answer, errors, or FILE
teacher={context: answer, divergence: reverse_kl} -> teacher.divergence: set teacher.top_k: 64
teacher.context=errors; rollout.context.policy=truncate -> rollout.context.policy: use keep
teacher.context=errors; rollout.context.keep_images=2 -> rollout.context.keep_images: set null
teacher.context=errors; rollout.agent={command: [python], options: {sandbox: none}} ->
    teacher.context: use the recipe's tools without an agent
teacher.context=solution; train.algorithm=distill; rollout.group_size=1 -> rollout.group_size: use at least 2
teacher.context=my_tools.py:Place -> teacher.context: is not a function
teacher.context=solution; train.algorithm=distill; rewards=[]; eval.data=null -> rewards: name FILE.py:NAME of a @reward
$TEACHER; train.algorithm=sft; data.path=talks.jsonl -> teacher: use train.algorithm=distill
teacher.coefficient=0.5 -> teacher.model: its server by teacher.url
$TEACHER; $URL -> teacher.url: remove one of them
$TEACHER; teacher.api_key_env=KEY -> teacher.api_key_env: set teacher.url
$URL; teacher.divergence=forward_kl -> teacher.top_k: teacher.top_k: 64
$URL; rollout.temperature=0.7 -> rollout.temperature: use 1
teacher.url=strong:8000 -> teacher.url: such as http://
$TEACHER; train.algorithm=distill; rollout.equal_rewards=refill -> rollout.equal_rewards: use keep
$TEACHER; train.algorithm=distill; train.advantage.malformed_turns=like_others ->
    train.advantage.malformed_turns: remove it
$URL; train.algorithm=distill; train.from_trajectories=recipe.yaml -> teacher.url: use teacher.model
$URL; server.url=http://127.0.0.1:8100/ -> teacher.url: train an adapter
$TEACHER; teacher.divergence=forward_kl; $FSDP2 -> teacher.divergence: use sampled, or strategy ddp
$TEACHER; teacher.divergence=forward_kl; $HSDP=4 -> teacher.divergence: hsdp, which gathers weights for whole passes
$HSDP=4; train.optimizer.name=muon -> train.optimizer.name: not exact on shards
$HSDP=1 -> train.processes: several on each of several machines
$HSDP=7 -> train.processes: a multiple of a machine's number, such as 16, or strategy fsdp2
$TEACHER; teacher.divergence=reverse_kl; train.algorithm=distill; train.loss.policy=gspo -> train.loss.policy: remove it
train.stop_when=[format, success]; data.shuffle=false ->
    train.stop_when: got 'success', which is not reported with data.shuffle=false
train.stop_when=[unstable]; rollout.curriculum={} -> train.stop_when: which is not reported with rollout.curriculum
$TEACHER; train.algorithm=distill; rewards=[] -> eval.data: set null
$TEACHER; train.algorithm=distill; train.loss.top_entropy=0.2 -> train.loss.top_entropy: remove it
$TEACHER; train.algorithm=distill; train.loss.kl={coefficient: 0.1, place: reward} -> train.loss.kl.place: use loss
$TEACHER; train.algorithm=distill; train.advantage.estimator=rloo -> train.algorithm: use rloo
train.algorithm=cispo; train.loss.options.clip_low=0.1 -> train.loss.options.clip_low: gspo
model.lora.rank=8; server.quantization=fp8 -> server.quantization: engine=vllm
model.lora.rank=8; server.engine=vllm; server.quantization=int4 -> server.quantization: engine=embedded
server.quantization=int8 -> server.quantization: train an adapter
server.model=org/Model-AWQ -> server.model: train an adapter
model.lora.rank=8; $UNCORRECTED; server.quantization=int8 -> train.loss.mismatch.correction: use token_truncate
train.precision=fp8; $UNCORRECTED -> train.loss.mismatch.correction: use token_truncate
$NF4; $UNCORRECTED -> train.loss.mismatch.correction: use token_truncate
$OUTSIDE; rollout.workers=2 -> rollout.workers: outside programs take tasks at one address; fix: use 1
rollout.agent={name: outside, options: {workspace: desk}} -> rollout.agent.options.workspace: command has it
rollout.agent={name: outside, command: [x]} -> rollout.agent: set one of name and command
rollout.agent={command: [x], options: {sandbox: none, memory_mb: 9}} ->
    rollout.agent.options.memory_mb: with sandbox=none
rollout.agent={command: [x], options: {memory_mb: 1}} -> rollout.agent.options.memory_mb: change it
rewards=[] -> rewards: no environment gives a reward
""")
NETWORK = table(r"""
$FSDP2; $NF4 -> model.lora.quantization: use ddp
$FSDP2; train.optimizer.name=muon -> train.optimizer.name: use adamw or sgd
train.attention=flash_attention_2; model.dtype=float32 -> train.attention: use sdpa, or bfloat16
model.dtype=bfloat16; train.attention=flash_attention_2; train.batching=tree -> train.attention: batching packed
train.attention=eager; train.batching=packed -> train.attention: use sdpa
model.lora={rank: 8, target_modules: [q_proj, lm_head]} ->
    model.lora.target_modules: use all-linear, or train all weights
model.lora={rank: 8, target_modules: '.*'} -> model.lora.target_modules: layers
model.lora={rank: 8, target_modules: '['} -> model.lora.target_modules: a list of names
$NF4 -> model.lora.quantization: pip install bitsandbytes
train.optimizer.name=lion -> train.optimizer.name: pip install bitsandbytes
train.liger=true -> train.liger: pip install liger-kernel
train.precision=fp8 -> train.precision: pip install torchao
$NF4; train.precision=fp8 -> train.precision: model.lora.quantization=null
model.dtype=bfloat16; train.attention=flash_attention_2 -> train.attention: pip install flash-attn
train.optimizer={name: adafactor, betas: [0.8, 0.9]} -> train.optimizer.betas: another optimizer
train.schedule=cosine; train.decay_steps=3 -> train.decay_steps: schedule=wsd
server={engine: vllm}; model.lora={rank: 8}; train.vision=trained -> train.vision: --enable-tower-connector-lora
train.schedule=wsd -> train.decay_steps: after the warm-up
""")
SGLANG = table(r"""
model.lora.rank=8 -> model.lora: set model.lora=null, or set server.engine=vllm
server.quantization=fp8 -> server.quantization: remove it, or set server.engine=vllm
rollout.inflight=keep; rollout.max_staleness=1 -> rollout.inflight: remove it
placement.mode=time_share -> placement.mode: use separate
sync.backend=ipc -> sync.backend: use file or auto
server.options.args=[--api-key, secret] -> server.options.args: remove it
server.options.data_parallel_size=2 -> server.options.data_parallel_size: unknown key
server.options.python=/nowhere/python -> server.options.python: name a Python
server.options.python=/bin/false -> server.options.python: name the Python
server.options.python=$PYTHON -> server.options.python: pip install
server.options.attach=gpu:30000 -> server.options.attach: http://127.0.0.1:30000
server.options.attach=http://gpu:99999 -> server.options.attach: :30000
$ATTACH; server.url=http://127.0.0.1:1 -> server.options.attach: server.url=null
$ATTACH; server.options.args=[--x] -> server.options.args: attach=null
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
        "train.loss.kl={coefficient: 0.1, estimator: k2}",
        "train.loss.mismatch={correction: geometric_mask, options: {low: 0.99, high: 1.01}}",
        "train.loss.mismatch.options.high=0.4",
        TEACHER,
        "teacher.context=solution",
        "teacher.context=solution; train.algorithm=distill; rollout.equal_rewards=refill",
        "teacher={context: errors, divergence: forward_kl, top_k: 8}; train.algorithm=distill; "
        "rewards=[]; eval.data=null",
        f"{TEACHER}; train.algorithm=distill; rewards=[]; eval.data=null; rollout.group_size=1",
        f"{TEACHER}; train.algorithm=distill; teacher.divergence=jensen_shannon",
        "train.algorithm=sft; data.path=talks.jsonl",
        "train.algorithm=gigpo; tools=[my_tools.py:Place]",
        "train.algorithm=gigpo; mcp_servers={parts: {command: python, args: [parts.py]}}",
        *(f"train.algorithm={name}" for name in ALGORITHMS if name not in ("gigpo", "distill", "sft")),
        *(f"{GIGPO}; train.algorithm={name}" for name in ("gigpo", "grpo", "dapo", "gspo", "sapo")),
        "model.lora.rank=8; server.quantization=int4",
        "model.lora.rank=8; server.model=org/Model-AWQ; train.loss.mismatch.correction=token_mask",
        NF4,
        f"{NF4}; server.quantization=int8; train.strategy=ddp; train.processes=2",
        f"model.lora.rank=8; {UNCORRECTED}",
        f"{NF4}; train.algorithm=sft; data.path=talks.jsonl",
        f"{FSDP2}; model.lora.rank=8; train.gradient_checkpointing=offload",
        f"{FSDP2}; train.compile=true; train.optimizer.name=sgd",
        "train.optimizer={name: muon, betas: [0.95, 0.99]}; train.attention=flex_attention",
        "train.schedule=wsd; train.warmup_steps=3; train.decay_steps=7",
        f"{OUTSIDE}; rewards=[]; rollout.workers=1",
        "rollout.agent={command: [ls]}; rollout.workers=2; train.batch_size=2",
    ],
)
def test_accepted(settings: str) -> None:
    load_and_check(overrides=settings.split("; "))


def test_fp8_without_compiled_layers_is_a_warning() -> None:
    for settings in (["train.precision=fp8"], ["train.precision=fp8", "train.compile=true"]):
        found = doubts(load_and_check("recipe.yaml", settings))
        assert any("fix: train.compile=true" in doubt for doubt in found) is (len(settings) == 1)


def test_a_running_server_needs_no_sglang_here() -> None:
    assert not load_and_check(overrides=["server.engine=sglang", ATTACH]).server.starts


def test_a_program_without_a_sandbox_is_one_in_every_process_of_a_run(project: Path) -> None:
    recipe = load_and_check(overrides=["rollout.agent={command: [ls], options: {sandbox: none}}"])
    # as the launcher, the trainer and the worker pass it on
    assert Recipe.model_validate(recipe.model_dump(mode="json")).rollout.agent == recipe.rollout.agent


def test_a_teacher_is_a_whole_model(project: Path) -> None:
    (project / "strong").mkdir()
    refused(r"teacher\.model: strong has no config\.json; fix: name a folder with a model", "teacher.model=./strong")
    (project / "strong" / "adapter_config.json").write_text("{}")
    refused(r"teacher\.model: strong holds a LoRA adapter, .* fix: `agentfactory export`", "teacher.model=./strong")
    (project / "strong" / "config.json").write_text("{}")
    load_and_check(overrides=["teacher.model=./strong"])


def test_a_text_model_has_no_vision_to_train(project: Path) -> None:
    load_and_check(overrides=["train.vision=1e-6"])  # nothing is known of the model
    config = project / "model" / "config.json"
    config.write_text('{"model_type": "qwen3"}')
    refused(r"train\.vision: got 1e-06, but .*model accepts only text; fix: remove it", "train.vision=1e-6")
    config.write_text('{"model_type": "omni", "thinker_config": {"vision_config": {}}}')
    load_and_check(overrides=["train.vision=1e-6"])


def test_an_agent_s_own_server_refuses_it_too() -> None:
    with pytest.raises(ValueError, match=r"server.quantization: got 'fp8', but the embedded engine supports only int8"):
        Agent("org/model", engine="embedded", server={"quantization": "fp8"})


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


ROPES = ('"dynamic"', '{"type": 3}', '{"type": "dynamic"}')


@pytest.mark.parametrize("text", ["{", "[1]", *(f'{{"rope_scaling": {kind}}}' for kind in ROPES)])
def test_a_damaged_configuration_is_named_when_the_model_is_loaded(project: Path, text: str) -> None:
    (project / "model" / "config.json").write_text(text)
    load_and_check(overrides=["server.max_model_len=8192"])


def test_a_variable_of_accelerate_is_refused_with_the_recipe(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    refused(r"ACCELERATE_DYNAMO_BACKEND: got 'inductor' .*, set train.compile$")
    load_and_check(purpose="eval")

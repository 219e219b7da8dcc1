"""Checks of a recipe's training fields against each other and against the server that receives the weights."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agentfactory.base.errors import Fault, SettingError, refuse, short
from agentfactory.base.http.loopback import is_http_address
from agentfactory.base.user_code.import_path import is_installed
from agentfactory.recipe.composition import display
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.config import EqualRewards, Part
from agentfactory.rollout.inference.adapter_config import ADAPTER
from agentfactory.rollout.inference.sequence_lengths import check_lengths
from agentfactory.rollout.model_hub import stored_file
from agentfactory.trainers.checkpoints.checkpoint_folder import AUTO
from agentfactory.trainers.config import ALGORITHMS, MaskOptions, Symptom
from agentfactory.trainers.loop.advantages import Estimator
from agentfactory.trainers.loop.health import ordered_by
from agentfactory.trainers.metrics import METRICS
from agentfactory.trainers.processes import check_launch_variables
from agentfactory.trainers.sync.backends import backend_of, check_backend

ADAPTED_TOWER = "--enable-tower-connector-lora"

Lack = Callable[[str, str, str], None]
"""Callback for a missing program or package: (field, problem, fix). It raises unless the recipe is only inspected."""


def check_training(recipe: Recipe, lack: Lack, runs_chains: bool) -> None:
    """Raise SettingError for the first field that cannot work; `runs_chains`: the run uses a server and a worker."""
    check_launch_variables()
    refuse(_network_faults(recipe))
    for fault in _missing_packages(recipe):
        lack(*fault)
    if runs_chains:
        check_backend(recipe)
        _check_lengths(recipe)
    refuse(_schedule_faults(recipe, runs_chains))
    refuse(_sft_faults(recipe) if recipe.train.algorithm == "sft" else _algorithm_faults(recipe))
    refuse(_unused_fields(recipe))
    refuse(_serving_faults(recipe) if runs_chains else _faults_without_chains(recipe))


def _network_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield what no trainer can compute. The trainer checks what depends on the device."""
    train, model = recipe.train, recipe.model
    quantization = model.lora.quantization if model.lora is not None else None
    if model.dtype == "float16":
        fix = "use bfloat16, or float32 on a CPU"
        yield "model.dtype", "got 'float16': training in it needs loss scaling", fix
    if train.strategy == "single" and train.processes > 1:
        yield "train.strategy", f"got 'single' with train.processes={train.processes}", "use ddp, or one process"
    if train.strategy == "hsdp" and all(train.processes % count for count in range(2, train.processes)):
        problem = f"got {train.processes} with train.strategy=hsdp: several on each of several machines"
        yield "train.processes", problem, "use a multiple of a machine's number, such as 16, or strategy fsdp2"
    if train.strategy != "single" and train.processes == 1:
        yield "train.processes", f"got 1 with train.strategy={train.strategy}", "use at least 2, or strategy single"
    folder = Path(model.path)
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        fix = f"set it to the base that {ADAPTER} names, and model.lora.from={display(folder)} to continue the adapter"
        yield "model.path", f"{display(folder)} holds a LoRA adapter, not a model", fix
    if train.is_sharded:
        if quantization is not None:
            problem = f"got {quantization!r} with train.strategy={train.strategy}"
            yield "model.lora.quantization", problem, "use ddp, or set null"
        if train.optimizer.name not in ("adamw", "sgd"):
            problem = f"got {train.optimizer.name!r}, which is not exact on shards (train.strategy={train.strategy})"
            yield "train.optimizer.name", problem, "use adamw or sgd, or strategy ddp"
    if train.precision != "auto" and quantization is not None:
        problem = f"got {train.precision!r} with model.lora.quantization={quantization}, whose weights have 4 bits"
        yield "train.precision", problem, "use auto, or set model.lora.quantization=null"
    if train.attention == "flash_attention_2" and model.dtype == "float32":
        yield "train.attention", "got 'flash_attention_2' with model.dtype=float32", "use sdpa, or bfloat16"
    if train.attention == "flash_attention_2" and train.batching == "tree":
        problem = "got 'flash_attention_2', which cannot compute trees"
        yield "train.attention", problem, "use sdpa, or batching packed"
    if train.attention == "eager" and train.batching in ("packed", "tree"):
        yield "train.attention", f"got 'eager' with train.batching={train.batching}", "use sdpa, or batching padded"
    if train.trains_vision and has_vision_tower(model.path) is False:
        problem = f"got {train.vision}, but {model.path} accepts only text"
        yield "train.vision", problem, "remove it, or train a model that accepts images"


def _missing_packages(recipe: Recipe) -> Iterator[Fault]:
    train, lora = recipe.train, recipe.model.lora
    needed = {
        "model.lora.quantization": ("bitsandbytes", lora is not None and lora.quantization is not None),
        "train.optimizer.name": ("bitsandbytes", train.optimizer.name in ("adamw_8bit", "lion")),
        "train.liger": ("liger_kernel", train.liger),
        "train.precision": ("torchao", train.precision != "auto"),
        "train.attention": ("flash_attn", train.attention == "flash_attention_2"),
    }
    for name, (package, asked) in needed.items():
        if asked and not is_installed(package):
            yield name, f"needs {package}, which is not installed", f"pip install {package.replace('_', '-')}"
    for name in recipe.track.trackers:
        if not is_installed(name):
            yield "track.trackers", f"got {name!r}, which is not installed", f"pip install {name}, or leave it out"


def _check_lengths(recipe: Recipe) -> None:
    trained = {"rollout.max_total_tokens": recipe.rollout.max_total_tokens}
    served = {"server.max_model_len": recipe.server.max_model_len} | trained
    teacher = recipe.teacher.model if recipe.teacher is not None else None
    for path, lengths in ((recipe.model.path, served), (teacher, trained)):
        if path is None or (text := _configuration(path)) is None:
            continue
        try:
            config = json.loads(text)
        except (ValueError, RecursionError):
            # named when the model is loaded
            continue
        if isinstance(config, dict):
            check_lengths(config, lengths)


def has_vision_tower(path: str) -> bool | None:
    """Return whether a model has a vision tower; None if its configuration is not on this machine."""
    text = _configuration(path)
    # somewhere in it: omni models nest it
    return None if text is None else b'"vision_config"' in text


def _configuration(path: str) -> bytes | None:
    file = stored_file(path, "config.json")
    return None if file is None else file.read_bytes()


def _schedule_faults(recipe: Recipe, runs_chains: bool) -> Iterator[Fault]:
    train, best = recipe.train, recipe.train.keep_best
    if train.warmup_steps > train.steps:
        problem = f"got {train.warmup_steps}, more than train.steps={train.steps}"
        yield "train.warmup_steps", problem, "lower it"
    if train.schedule == "wsd" and not 0 < train.decay_steps <= train.steps - train.warmup_steps:
        problem = f"got {train.decay_steps} with schedule wsd, {train.steps} steps and {train.warmup_steps} of warm-up"
        yield "train.decay_steps", problem, "give wsd some of the steps after the warm-up for its decay"
    if train.has_critic and train.critic.critic_warmup_steps >= train.steps:
        problem = f"got {train.critic.critic_warmup_steps}, and train.steps={train.steps}: the policy would never learn"
        yield "train.advantage.options.critic_warmup_steps", problem, "lower it"
    if best in (None, AUTO):
        return
    if train.keep_last is None:
        problem = f"got {best!r}, but nothing is deleted"
        yield "train.keep_best", problem, "set train.keep_last too, or remove it"
    if best.startswith("eval/") and not (runs_chains and recipe.eval.data and recipe.eval.every):
        problem = f"got {best!r}, but checkpoints are not evaluated"
        yield "train.keep_best", problem, "set eval.data and eval.every"
    if not any(re.fullmatch(re.sub("<[a-z]+>", ".+", metric.name), best) for metric in METRICS):
        problem = f"got {best!r}, which is no metric"
        yield "train.keep_best", problem, "name one, such as eval/sampled/success"


def _sft_faults(recipe: Recipe) -> Iterator[Fault]:
    train = recipe.train
    if recipe.data is None and train.from_trajectories is None:
        yield "data", "missing: sft needs conversations", "set data.path, or train.from_trajectories"
    if train.updates_per_batch > 1:
        yield "train.updates_per_batch", f"got {train.updates_per_batch} with sft", "use 1"
    if recipe.teacher is not None:
        problem = "set, but train.algorithm=sft runs no chains that a teacher could grade"
        fix = "remove it, or use train.algorithm=distill, with train.from_trajectories for saved groups"
        yield "teacher", problem, fix


def _algorithm_faults(recipe: Recipe) -> Iterator[Fault]:
    train, estimator = recipe.train, recipe.train.advantage.estimator
    compares = Estimator(train.advantage).compares
    if compares:
        _check_group_size(recipe, f"got 1: {estimator} compares the chains of a task")
    for name, chosen in (("advantage.estimator", estimator), ("loss.policy", train.loss.policy)):
        # an estimator or a policy loss that defines the algorithm; a user's function keeps its other defaults
        preset = ALGORITHMS[train.algorithm].get(f"train.{name}", chosen)
        if chosen != preset and ".py:" not in chosen:
            # grpo is the default, and accepts any
            others = (other for other, fields in ALGORITHMS.items() if fields.get(f"train.{name}") == chosen)
            problem = f"got {train.algorithm!r}, which is {name}={preset}, with {name}={chosen}"
            yield "train.algorithm", problem, f"use {next(others, 'grpo')}, or remove {name}"
    kl = train.loss.kl
    if kl.place == "reward" and estimator == "none":
        yield "train.loss.kl.place", "got 'reward', and estimator=none omits rewards", "use loss"
    if kl.place == "reward" and compares:
        whole = "turn" if estimator == "gigpo" else "chain"
        problem = f"got 'reward', but advantage.estimator={estimator} gives all tokens of a {whole} the same"
        yield "train.loss.kl.place", problem, "use loss, or the estimator reinforce_pp or gae"
    if ".py:" in train.loss.policy:
        from agentfactory.trainers.update.losses import PolicyLoss

        PolicyLoss(train.loss)
    if kl.coefficient and kl.estimator == "k1" and kl.place == "loss":
        problem = "got 'k1', whose gradient as a loss is 0 on average: nothing holds the policy back"
        yield "train.loss.kl.estimator", problem, "use k2 or k3, or place: reward"
    mismatch = train.loss.mismatch
    if mismatch.correction == "geometric_mask" and mismatch.options == MaskOptions():
        problem = f"got {mismatch.options.low} to {mismatch.options.high}, the defaults for ratios of tokens: the "
        problem += "geometric mean of a sequence is never outside, so nothing is masked"
        yield "train.loss.mismatch.options", problem, "set options: {low: 0.99, high: 1.01}, or bounds close to 1"
    for part in recipe.parts() if train.overlong is not None else ():
        assert train.overlong is not None
        if train.overlong.buffer > (most := part.recipe.rollout.max_total_tokens):
            where = f"{part.section if part.name else 'rollout'}.max_total_tokens={most}"
            yield "train.overlong.buffer", f"got {train.overlong.buffer}, more than {where}", "lower it"
    yield from _teacher_faults(recipe)


def _teacher_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield what a policy without rewards lacks, and what the processes cannot compare with the teacher's."""
    teacher, train, rollout = recipe.teacher, recipe.train, recipe.rollout
    only_teacher = train.advantage.estimator == "none"
    if teacher is None:
        if only_teacher:
            name = "train.algorithm=distill" if train.algorithm == "distill" else "train.advantage.estimator=none"
            fix = "set teacher.model, teacher.url or teacher.context, or use train.algorithm=grpo"
            yield "teacher", f"missing: with {name}, only a teacher trains the policy", fix
        return
    own = {address.rstrip("/") for address in recipe.server.urls}
    for server in recipe.teacher_servers.values():
        if not is_http_address(server.url):
            yield server.field, f"got {server.url!r}, which is no address", "write one such as http://127.0.0.1:8000"
        if rollout.temperature != 1.0:
            problem = f"got {rollout.temperature:g}, and the server at teacher.url gives log-probabilities at 1 only"
            yield "rollout.temperature", problem, "use 1, or teacher.model"
        if train.from_trajectories:
            problem = "set, but train.from_trajectories runs no chains that a rollout worker could have graded"
            yield "teacher.url", problem, "use teacher.model"
        if server.url.rstrip("/") in own and recipe.model.lora is None:
            problem = f"{server.url} is server.url, too, whose weights change at every step"
            yield server.field, problem, "name another server, or train an adapter (model.lora)"
    path = teacher.model
    if path is not None and os.path.isabs(path) and (folder := Path(path)).is_dir():
        has_model = (folder / "config.json").is_file()
        if (folder / ADAPTER).is_file() and not has_model:
            fix = "`agentfactory export` it merged, and name that folder"
            yield "teacher.model", f"{display(folder)} holds a LoRA adapter, not a model", fix
        if not has_model:
            fix = "name a folder with a model, such as the checkpoints/step-000050 of a run"
            yield "teacher.model", f"{display(folder)} has no config.json", fix
    if teacher.is_exact and train.is_sharded:
        sharded = f"train.strategy={train.strategy}, which gathers weights for whole passes only"
        problem = f"got {teacher.divergence!r} with {sharded}"
        yield "teacher.divergence", problem, "set teacher.top_k: 64, or use sampled, or strategy ddp"
    if only_teacher and teacher.context != "solution" and rollout.equal_rewards is not EqualRewards.KEEP:
        problem = f"got {rollout.equal_rewards.value!r}, which drops groups although their chains are graded: only the "
        yield "rollout.equal_rewards", f"{problem}teacher trains", "use keep"
    if teacher.context is None:
        return
    several = "with teacher.context, which adds to the one prompt of a chain"
    for part in recipe.parts():
        context = part.recipe.rollout.context
        if context.policy != "keep":
            yield part.field("rollout.context.policy"), f"got {context.policy!r} {several}", "use keep"
        if context.keep_images is not None:
            yield part.field("rollout.context.keep_images"), f"got {context.keep_images} {several}", "set null"
    if teacher.context == "solution":
        _check_group_size(recipe, "got 1 with teacher.context=solution, which is another chain of the group")


def _check_group_size(recipe: Recipe, problem: str) -> None:
    for part in recipe.parts() or [Part("data", recipe)]:
        if part.recipe.rollout.group_size < 2:
            raise part.located(SettingError("rollout.group_size", problem, "use at least 2"))


def _unused_fields(recipe: Recipe) -> Iterator[Fault]:
    train = recipe.train
    rl, optimizer, kl = train.algorithm != "sft", train.optimizer.name, train.loss.kl
    judged = train.advantage.estimator != "none"
    advantages = judged or recipe.teacher is None or recipe.teacher.is_sampled
    learning, sampled = "an algorithm that learns from rewards", "rewards or teacher.divergence=sampled"
    needs = {
        "train.decay_steps": (train.schedule == "wsd", "train.schedule=wsd"),
        "train.optimizer.betas": (optimizer != "adafactor", "another optimizer than adafactor"),
        "train.min_reward": (not rl and train.from_trajectories is not None, "sft on train.from_trajectories"),
        "train.advantage": (rl, "a reinforcement learning algorithm"),
        "train.advantage.malformed_turns": (not rl or judged, learning),
        "train.loss": (rl, "a reinforcement learning algorithm"),
        "train.overlong": (rl and judged, learning),
        "train.loss.top_entropy": (judged, learning),
        "train.loss.policy": (advantages, sampled),
        "train.loss.mismatch": (advantages, sampled),
        "train.stop_when": (rl, "a reinforcement learning algorithm"),
        "train.loss.kl.estimator": (kl.coefficient > 0, "train.loss.kl.coefficient > 0"),
        "train.loss.kl.place": (kl.coefficient > 0, "train.loss.kl.coefficient > 0"),
    }
    for name, (used, with_what) in needs.items():
        section: Any = train
        *path, last = name.split(".")[1:]
        for key in path:
            section = getattr(section, key)
        value, default = getattr(section, last), type(section).model_fields[last].default
        if not used and value not in (default, ALGORITHMS[train.algorithm].get(name, default)):
            shown = "a setting" if isinstance(value, BaseModel) else short(value)
            yield name, f"got {shown}, which has an effect only with {with_what}", "remove it, or change that"
    order = ordered_by(recipe)
    for symptom in (Symptom.SUCCESS, Symptom.UNSTABLE):
        if order is not None and symptom in train.stop_when:
            problem = f"got {symptom.value!r}, which is not reported with {order}: later tasks may be harder"
            yield "train.stop_when", problem, "remove it, or change that"


def _faults_without_chains(recipe: Recipe) -> Iterator[Fault]:
    if recipe.eval.every:
        what = "sft" if recipe.train.algorithm == "sft" else "train.from_trajectories"
        problem = f"got {recipe.eval.every}, but {what} runs no chains"
        yield "eval.every", problem, "set 0 and run `agentfactory eval` after"
    idle = {"equal_rewards": EqualRewards.KEEP, "curriculum": None, "max_staleness": 0}
    for name, value in idle.items() if recipe.train.from_trajectories else ():
        if getattr(recipe.rollout, name) != value:
            problem = "is set, but train.from_trajectories uses the saved groups unchanged"
            yield f"rollout.{name}", problem, "remove it, or sort the groups before"


def _serving_faults(recipe: Recipe) -> Iterator[Fault]:
    train, server, lora = recipe.train, recipe.server, recipe.model.lora
    yield from _worker_faults(recipe)
    ours = server.engine == "vllm" and server.url is None
    # by default, vLLM answers 200 and drops them
    if lora is not None and train.trains_vision and ours and ADAPTED_TOWER not in server.vllm.args:
        problem = "got trained with model.lora, and vLLM drops the adapter's weights in the vision tower"
        yield "train.vision", problem, f"add {ADAPTED_TOWER} to server.options.args, or use frozen"
    if train.loss.mismatch.correction == "none":
        own = {} if train.precision == "auto" else {"train.precision": train.precision}
        for name, value in {**recipe.rounding, **own}.items():
            problem = f"got 'none' with {name}={value}: the server computes with other weights or in another precision"
            fix = "use token_truncate, the default, or another correction"
            yield "train.loss.mismatch.correction", problem, fix
    if lora is None:
        fix = "train an adapter (model.lora.rank), or remove it"
        if server.model is not None:
            yield "server.model", f"got {server.model!r}, a copy that cannot receive full weights", fix
        if server.quantization is not None:
            yield "server.quantization", f"got {server.quantization!r}, which cannot receive full weights", fix
        return
    yield from _unserved_modules(lora.target_modules)
    for name, given in (("model", server.model), ("url", server.url)) if lora.merge else ():
        if given is not None:
            problem = f"got {short(given)}, which serves the base without the adapter that the run merges into it"
            fix = "`agentfactory export` the adapter merged, and make that model.path, without model.lora.from; or "
            yield f"server.{name}", problem, f"{fix}remove it"


def _worker_faults(recipe: Recipe) -> Iterator[Fault]:
    groups, workers = recipe.train.batch_size, recipe.rollout.workers
    if groups % workers:
        possible = [str(count) for count in range(1, groups + 1) if groups % count == 0]
        problem = f"got {workers}, which do not divide train.batch_size={groups} into equal shares"
        yield "rollout.workers", problem, f"use one of {', '.join(possible)}"
    if workers == 1:
        return
    agents = [part.recipe.rollout.agent for part in recipe.parts()]
    if any(agent is not None and agent.outside is not None for agent in agents):
        yield "rollout.workers", f"got {workers}: outside programs take tasks at one address", "use 1"
    mixing = recipe.data is not None and recipe.data.curriculum is not None
    if mixing or recipe.rollout.curriculum is not None:
        name = "data.curriculum" if mixing else "rollout.curriculum"
        problem = f"got {workers}: {name} needs the outcomes of all tasks"
        yield "rollout.workers", problem, "use 1, or remove the curriculum"


_UNSERVED = ("lm_head", "embed_out", "output_layer", "embed_tokens", "embed_in", "wte", "wpe", "word_embeddings")
"""Names of output heads and embeddings in transformers, on which inference servers take no adapter."""


def _unserved_modules(targets: str | list[str]) -> Iterator[Fault]:
    name = "model.lora.target_modules"
    if isinstance(targets, list):
        found = [module for module in targets if module.rpartition(".")[2] in _UNSERVED]
    else:
        try:
            pattern = re.compile(targets)
        except re.error as error:
            yield name, f"got {targets!r}: {error}", "use all-linear, a list of names, or a regular expression"
            return
        places = ("", "model.", "model.language_model.", "transformer.")
        found = [module for module in _UNSERVED if any(pattern.fullmatch(f"{place}{module}") for place in places)]
    if found:
        problem = f"got {short(targets)}: servers take adapters on linear modules of layers, not on {', '.join(found)}"
        yield name, problem, "leave these out, use all-linear, or train all weights: model.lora: null"


def placement_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield why no devices can satisfy the placement; the run uses a server."""
    mode, server, backend = recipe.placement.mode, recipe.server, backend_of(recipe)
    if mode == "separate" and backend.devices == "one" and server.engine == "vllm":
        problem = f"got {backend.name!r} with placement.mode=separate: it is for one GPU"
        yield "sync.backend", problem, "use auto, file or nccl"
    if mode not in ("split", "time_share"):
        return
    alone = f"with placement.mode={mode}: one trainer process and one server share the GPU"
    for name, value in {
        "train.processes": recipe.train.processes,
        "server.options.tensor_parallel_size": server.vllm.tensor_parallel_size,
        "server.options.data_parallel_size": server.vllm.data_parallel_size,
    }.items():
        if value > 1:
            yield name, f"got {value} {alone}", "use 1, or set placement.mode=separate"
    if len(server.urls) > 1:
        yield "server.url", f"got {len(server.urls)} servers {alone}", "name one, or set placement.mode=separate"
    if backend.devices == "apart":
        problem = f"got {backend.name!r} with placement.mode={mode}: it needs separate GPUs"
        yield "sync.backend", problem, "use auto, ipc or file"
    if mode == "time_share" and (staleness := recipe.rollout.max_staleness):
        problem = f"got {staleness} with placement.mode=time_share: no chain runs while the trainer has the GPU"
        yield "rollout.max_staleness", problem, "use 0, or placement.mode=split"

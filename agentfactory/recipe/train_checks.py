"""Checks of a recipe's training fields against each other and against the server that receives the weights."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agentfactory.base.errors import SettingError, short
from agentfactory.base.http.loopback import is_http_address
from agentfactory.base.user_code.import_path import is_installed
from agentfactory.recipe.composition import display
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.config import EqualRewards, Part, RolloutConfig
from agentfactory.rollout.config.server import TeacherServer
from agentfactory.rollout.inference.adapter_config import ADAPTER
from agentfactory.rollout.inference.sequence_lengths import check_lengths
from agentfactory.trainers.checkpoints.best_checkpoint import AUTO
from agentfactory.trainers.config import ALGORITHMS, MaskOptions, Symptom, TrainConfig
from agentfactory.trainers.loop.advantages import Estimator
from agentfactory.trainers.loop.health import ordered_by
from agentfactory.trainers.metrics import METRICS
from agentfactory.trainers.processes.launch_variables import check_launch_variables
from agentfactory.trainers.sync.backends import backend_of, check_backend

ADAPTED_TOWER = "--enable-tower-connector-lora"
"""vLLM's switch for adapters of vision towers."""

Lack = Callable[[str, str, str], None]
"""Callback for a missing program or package: (field, problem, fix). It raises unless the recipe is only inspected."""


def check_training(recipe: Recipe, lack: Lack, runs_chains: bool) -> None:
    """Raise SettingError for the first field that cannot work; `runs_chains`: the run uses a server and a worker."""
    check_launch_variables()
    _check_processes(recipe)
    _check_model(recipe)
    _check_network(recipe, lack)
    _check_vision(recipe)
    if runs_chains:
        check_backend(recipe)
        _check_lengths(recipe)
    _check_schedule(recipe)
    _check_kept(recipe, runs_chains)
    _check_trackers(recipe, lack)
    if recipe.train.algorithm == "sft":
        _check_sft(recipe)
    else:
        _check_algorithm(recipe)
        _check_teacher(recipe)
    _check_unused(recipe)
    if recipe.eval.every and not runs_chains:
        what = "sft" if recipe.train.algorithm == "sft" else "train.from_trajectories"
        raise SettingError(
            "eval.every",
            f"got {recipe.eval.every}, but {what} runs no chains",
            "set 0 and run `agentfactory eval` after",
        )
    if runs_chains:
        _check_workers(recipe)
        _check_adapted_tower(recipe)
        _check_mismatch(recipe)
        if recipe.model.lora is None:
            _check_full_weights(recipe)
        else:
            _check_served_modules(recipe.model.lora.target_modules)
            _check_merged_base(recipe)
    if recipe.train.from_trajectories:
        for name, idle in (("equal_rewards", EqualRewards.KEEP), ("curriculum", None), ("max_staleness", 0)):
            if getattr(recipe.rollout, name) != idle:
                problem = "is set, but train.from_trajectories uses the saved groups unchanged"
                raise SettingError(f"rollout.{name}", problem, "remove it, or sort the groups before")


def _check_processes(recipe: Recipe) -> None:
    train = recipe.train
    if recipe.model.dtype == "float16":
        raise SettingError(
            "model.dtype", "got 'float16': training in it needs loss scaling", "use bfloat16, or float32 on a CPU"
        )
    if train.strategy == "single" and train.processes > 1:
        raise SettingError(
            "train.strategy", f"got 'single' with train.processes={train.processes}", "use ddp, or one process"
        )
    if train.strategy != "single" and train.processes == 1:
        raise SettingError(
            "train.processes", f"got 1 with train.strategy={train.strategy}", "use at least 2, or strategy single"
        )


def _check_model(recipe: Recipe) -> None:
    folder = Path(recipe.model.path)
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        problem = f"{display(folder)} holds a LoRA adapter, not a model"
        fix = f"set it to the base that {ADAPTER} names, and model.lora.from={display(folder)} to continue the adapter"
        raise SettingError("model.path", problem, fix)


def _check_network(recipe: Recipe, lack: Lack) -> None:
    """Check that the requested network and optimizer are available. The trainer checks what depends on the device."""
    train, lora = recipe.train, recipe.model.lora
    quantization, optimizer = lora and lora.quantization, train.optimizer.name
    if train.strategy == "fsdp2":
        if quantization is not None:
            raise SettingError(
                "model.lora.quantization", f"got {quantization!r} with train.strategy=fsdp2", "use ddp, or set null"
            )
        if optimizer not in ("adamw", "sgd"):
            problem = f"got {optimizer!r}, which is not exact on weights that train.strategy=fsdp2 shards"
            raise SettingError("train.optimizer.name", problem, "use adamw or sgd, or strategy ddp")
    if train.precision != "auto" and quantization is not None:
        problem = f"got {train.precision!r} with model.lora.quantization={quantization}, whose weights have 4 bits"
        raise SettingError("train.precision", problem, "use auto, or set model.lora.quantization=null")
    if train.attention == "flash_attention_2":
        if recipe.model.dtype == "float32":
            raise SettingError(
                "train.attention", "got 'flash_attention_2' with model.dtype=float32", "use sdpa, or bfloat16"
            )
        if train.batching == "tree":
            raise SettingError(
                "train.attention", "got 'flash_attention_2', which cannot compute trees", "use sdpa, or batching packed"
            )
    if train.attention == "eager" and train.batching in ("packed", "tree"):
        raise SettingError(
            "train.attention", f"got 'eager' with train.batching={train.batching}", "use sdpa, or batching padded"
        )
    needed = {
        "model.lora.quantization": ("bitsandbytes", quantization is not None),
        "train.optimizer.name": ("bitsandbytes", optimizer in ("adamw_8bit", "lion")),
        "train.liger": ("liger_kernel", train.liger),
        "train.precision": ("torchao", train.precision != "auto"),
        "train.attention": ("flash_attn", train.attention == "flash_attention_2"),
    }
    for name, (package, asked) in needed.items():
        if asked and not is_installed(package):
            lack(name, f"needs {package}, which is not installed", f"pip install {package.replace('_', '-')}")


_UNSERVED = ("lm_head", "embed_out", "output_layer", "embed_tokens", "embed_in", "wte", "wpe", "word_embeddings")
"""Names of output heads and embeddings in transformers, on which inference servers take no adapter."""


def _check_served_modules(targets: str | list[str]) -> None:
    """Raise SettingError if an adapter would be on a head or on embeddings."""
    if isinstance(targets, list):
        found = [name for name in targets if name.rpartition(".")[2] in _UNSERVED]
        rest = [name for name in targets if name not in found]
        fix = f"write {short(rest)}".replace("'", "") if rest else "use all-linear"
    else:
        try:
            pattern = re.compile(targets)
        except re.error as error:
            fix = "use all-linear, a list of names, or a regular expression"
            raise SettingError("model.lora.target_modules", f"got {targets!r}: {error}", fix) from None
        places = ("", "model.", "model.language_model.", "transformer.")
        found = [name for name in _UNSERVED if any(pattern.fullmatch(f"{place}{name}") for place in places)]
        fix = "use all-linear, or a pattern for the layers only, such as '.*\\.layers\\..*_proj'"
    if found:
        problem = f"got {short(targets)}: servers take adapters on linear modules of layers, not on {', '.join(found)}"
        fix = f"{fix}; or train all weights: model.lora: null"
        raise SettingError("model.lora.target_modules", problem, fix)


def _check_vision(recipe: Recipe) -> None:
    """Check that the model, if its configuration is on this machine, has a vision tower to train."""
    path = recipe.model.path
    if recipe.train.trains_vision and has_vision_tower(path) is False:
        problem = f"got {recipe.train.vision}, but {path} accepts only text"
        raise SettingError("train.vision", problem, "remove it, or train a model that accepts images")


def _check_lengths(recipe: Recipe) -> None:
    """Check that no sequence of the server or the trainer is too long for the positions of a model that is on this
    machine."""
    trained = {"rollout.max_total_tokens": recipe.rollout.max_total_tokens}
    served = {"server.max_model_len": recipe.server.max_model_len} | trained
    teacher = recipe.teacher.model if recipe.teacher is not None else None
    for path, lengths in ((recipe.model.path, served), (teacher, trained)):
        if path is None or (text := _configuration(path)) is None:
            continue
        try:
            config = json.loads(text)
        except ValueError:
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
    """Return the content of a model's config.json; None if it is not on this machine."""
    file: Any = Path(path) / "config.json"
    if not os.path.isabs(path):
        # imported here, because few recipes need it
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(path, "config.json")
    if not isinstance(file, (str, Path)) or not os.path.isfile(file):
        return None
    return Path(file).read_bytes()


def _check_trackers(recipe: Recipe, lack: Lack) -> None:
    for name in recipe.track.trackers:
        if not is_installed(name):
            lack("track.trackers", f"got {name!r}, which is not installed", f"pip install {name}, or leave it out")


def check_placement(recipe: Recipe) -> None:
    """Raise SettingError for a placement that no devices can satisfy; the run uses a server."""
    mode, server, backend = recipe.placement.mode, recipe.server, backend_of(recipe)
    if mode == "separate" and backend.devices == "one" and server.engine == "vllm":
        problem = f"got {backend.name!r} with placement.mode=separate: it is for one GPU"
        raise SettingError("sync.backend", problem, "use auto, file or nccl")
    if mode not in ("split", "time_share"):
        return
    alone = f"with placement.mode={mode}: one trainer process and one server share the GPU"
    for name, value in {
        "train.processes": recipe.train.processes,
        "server.options.tensor_parallel_size": server.vllm.tensor_parallel_size,
        "server.options.data_parallel_size": server.vllm.data_parallel_size,
    }.items():
        if value > 1:
            raise SettingError(name, f"got {value} {alone}", "use 1, or set placement.mode=separate")
    if len(server.urls) > 1:
        raise SettingError(
            "server.url", f"got {len(server.urls)} servers {alone}", "name one, or set placement.mode=separate"
        )
    if backend.devices == "apart":
        problem = f"got {backend.name!r} with placement.mode={mode}: it needs separate GPUs"
        raise SettingError("sync.backend", problem, "use auto, ipc or file")
    staleness = recipe.rollout.max_staleness
    if mode == "time_share" and staleness:
        problem = f"got {staleness} with placement.mode=time_share: no chain runs while the trainer has the GPU"
        raise SettingError("rollout.max_staleness", problem, "use 0, or placement.mode=split")


def _check_schedule(recipe: Recipe) -> None:
    train = recipe.train
    if train.warmup_steps > train.steps:
        raise SettingError(
            "train.warmup_steps", f"got {train.warmup_steps}, more than train.steps={train.steps}", "lower it"
        )
    if train.schedule == "wsd" and not 0 < train.decay_steps <= train.steps - train.warmup_steps:
        problem = f"got {train.decay_steps} with schedule wsd, {train.steps} steps and {train.warmup_steps} of warm-up"
        raise SettingError("train.decay_steps", problem, "give wsd some of the steps after the warm-up for its decay")
    if train.has_critic and train.critic.critic_warmup_steps >= train.steps:
        problem = f"got {train.critic.critic_warmup_steps}, and train.steps={train.steps}: the policy would never learn"
        raise SettingError("train.advantage.options.critic_warmup_steps", problem, "lower it")


def _check_workers(recipe: Recipe) -> None:
    rollout, groups = recipe.rollout, recipe.train.batch_size
    if groups % rollout.workers:
        problem = f"got {rollout.workers}, which do not divide train.batch_size={groups} into equal shares"
        possible = [count for count in range(1, groups + 1) if groups % count == 0]
        raise SettingError("rollout.workers", problem, f"use one of {', '.join(map(str, possible))}")
    agents = [part.recipe.rollout.agent for part in recipe.parts()]
    if rollout.workers > 1 and any(agent is not None and agent.outside is not None for agent in agents):
        problem = f"got {rollout.workers}: outside programs take tasks at one address"
        raise SettingError("rollout.workers", problem, "use 1")
    mixing = recipe.data is not None and recipe.data.curriculum is not None
    if rollout.workers > 1 and (mixing or rollout.curriculum is not None):
        name = "data.curriculum" if mixing else "rollout.curriculum"
        problem = f"got {rollout.workers}: {name} needs the outcomes of all tasks"
        raise SettingError("rollout.workers", problem, "use 1, or remove the curriculum")


def _check_kept(recipe: Recipe, runs_chains: bool) -> None:
    wanted = recipe.train.keep_best
    if wanted in (None, AUTO):
        return
    if recipe.train.keep_last is None:
        raise SettingError(
            "train.keep_best", f"got {wanted!r}, but nothing is deleted", "set train.keep_last too, or remove it"
        )
    if wanted.startswith("eval/") and not (runs_chains and recipe.eval.data and recipe.eval.every):
        raise SettingError(
            "train.keep_best", f"got {wanted!r}, but checkpoints are not evaluated", "set eval.data and eval.every"
        )
    patterns = (re.sub("<[a-z]+>", ".+", metric.name) for metric in METRICS)
    if not any(re.fullmatch(pattern, wanted) for pattern in patterns):
        raise SettingError(
            "train.keep_best", f"got {wanted!r}, which is no metric", "name one, such as eval/sampled/success"
        )


def _check_sft(recipe: Recipe) -> None:
    train = recipe.train
    if recipe.data is None and train.from_trajectories is None:
        raise SettingError("data", "missing: sft needs conversations", "set data.path, or train.from_trajectories")
    if train.updates_per_batch > 1:
        raise SettingError("train.updates_per_batch", f"got {train.updates_per_batch} with sft", "use 1")
    if recipe.teacher is not None:
        problem = "set, but train.algorithm=sft runs no chains that a teacher could grade"
        fix = "remove it, or use train.algorithm=distill, with train.from_trajectories for saved groups"
        raise SettingError("teacher", problem, fix)


def _check_algorithm(recipe: Recipe) -> None:
    train, estimator = recipe.train, recipe.train.advantage.estimator
    compares = Estimator(train.advantage).compares
    if compares:
        _check_group_size(recipe, f"got 1: {estimator} compares the chains of a task")
    _check_replaced(train)
    if train.loss.kl.place == "reward" and estimator == "none":
        raise SettingError("train.loss.kl.place", "got 'reward', and estimator=none omits rewards", "use loss")
    if train.loss.kl.place == "reward" and compares:
        whole = "turn" if estimator == "gigpo" else "chain"
        problem = f"got 'reward', but advantage.estimator={estimator} gives all tokens of a {whole} the same"
        raise SettingError("train.loss.kl.place", problem, "use loss, or the estimator reinforce_pp or gae")
    if ".py:" in train.loss.policy:
        # imported here, because it imports torch
        from agentfactory.trainers.update.losses import PolicyLoss

        PolicyLoss(train.loss)
    distance = train.loss.kl
    if distance.coefficient and distance.estimator == "k1" and distance.place == "loss":
        problem = "got 'k1', whose gradient as a loss is 0 on average: nothing holds the policy back"
        raise SettingError("train.loss.kl.estimator", problem, "use k2 or k3, or place: reward")
    mismatch = train.loss.mismatch
    if mismatch.correction == "geometric_mask" and mismatch.options == MaskOptions():
        problem = f"got {mismatch.options.low} to {mismatch.options.high}, the defaults for ratios of tokens: the "
        problem += "geometric mean of a sequence is never outside, so nothing is masked"
        fix = "set options: {low: 0.99, high: 1.01}, or other bounds close to 1"
        raise SettingError("train.loss.mismatch.options", problem, fix)
    for part in recipe.parts() if train.overlong is not None else ():
        assert train.overlong is not None
        if train.overlong.buffer > (most := part.recipe.rollout.max_total_tokens):
            where = f"{part.section if part.name else 'rollout'}.max_total_tokens={most}"
            raise SettingError("train.overlong.buffer", f"got {train.overlong.buffer}, more than {where}", "lower it")


def _check_teacher(recipe: Recipe) -> None:
    """Check that a policy without rewards has a teacher, and that the processes can compare it with the teacher's."""
    teacher, train = recipe.teacher, recipe.train
    if teacher is None and train.advantage.estimator == "none":
        name = "train.algorithm=distill" if train.algorithm == "distill" else "train.advantage.estimator=none"
        problem = f"missing: with {name}, only a teacher trains the policy"
        fix = "set teacher.model, teacher.url or teacher.context, or use train.algorithm=grpo"
        raise SettingError("teacher", problem, fix)
    if teacher is None:
        return
    for server in recipe.teacher_servers.values():
        _check_teacher_server(recipe, server)
    path = teacher.model
    if path is not None and os.path.isabs(path) and (folder := Path(path)).is_dir():
        if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
            problem, fix = "holds a LoRA adapter, not a model", "`agentfactory export` it merged, and name that folder"
            raise SettingError("teacher.model", f"{display(folder)} {problem}", fix)
        if not (folder / "config.json").is_file():
            fix = "name a folder with a model, such as the checkpoints/step-000050 of a run"
            raise SettingError("teacher.model", f"{display(folder)} has no config.json", fix)
    if teacher.is_exact and train.strategy == "fsdp2":
        problem = f"got {teacher.divergence!r} with train.strategy=fsdp2, which gathers weights for whole passes only"
        raise SettingError("teacher.divergence", problem, "set teacher.top_k: 64, or use sampled, or strategy ddp")
    kept, drops = recipe.rollout.equal_rewards, train.advantage.estimator == "none" and teacher.context != "solution"
    if drops and kept is not EqualRewards.KEEP:
        problem = f"got {kept.value!r}, which drops groups although their chains are graded: only the teacher trains"
        raise SettingError("rollout.equal_rewards", problem, "use keep")
    if teacher.context is not None:
        _check_one_row(recipe.rollout)
        if teacher.context == "solution":
            _check_group_size(recipe, "got 1 with teacher.context=solution, which is another chain of the group")


def _check_group_size(recipe: Recipe, problem: str) -> None:
    """Raise SettingError with this `problem` if groups of a source have a single chain."""
    for part in recipe.parts() or [Part("data", recipe)]:
        if part.recipe.rollout.group_size < 2:
            raise part.located(SettingError("rollout.group_size", problem, "use at least 2"))


def _check_one_row(rollout: RolloutConfig) -> None:
    """Raise SettingError for settings with which a chain may have several rows: teacher.context adds to one prompt."""
    problem = "with teacher.context, which adds to the one prompt of a chain"
    if rollout.context.policy != "keep":
        raise SettingError("rollout.context.policy", f"got {rollout.context.policy!r} {problem}", "use keep")
    if rollout.context.keep_images is not None:
        raise SettingError("rollout.context.keep_images", f"got {rollout.context.keep_images} {problem}", "set null")


def _check_teacher_server(recipe: Recipe, server: TeacherServer) -> None:
    """Check what a teacher behind a server cannot do."""
    url, field = server.url, server.field
    if not is_http_address(url):
        raise SettingError(field, f"got {url!r}, which is no address", "write one such as http://127.0.0.1:8000")
    if recipe.rollout.temperature != 1.0:
        problem = f"got {recipe.rollout.temperature:g}, and the server at teacher.url gives log-probabilities at 1 only"
        raise SettingError("rollout.temperature", problem, "use 1, or teacher.model")
    if recipe.train.from_trajectories:
        problem = "set, but train.from_trajectories runs no chains that a rollout worker could have graded"
        raise SettingError("teacher.url", problem, "use teacher.model")
    own = {address.rstrip("/") for address in recipe.server.urls}
    if url.rstrip("/") in own and recipe.model.lora is None:
        problem = f"{url} is server.url, too, whose weights change at every step"
        raise SettingError(field, problem, "name another server, or train an adapter (model.lora)")


def _check_replaced(train: TrainConfig) -> None:
    """Raise SettingError if an estimator or policy loss defines the algorithm and the recipe sets another built-in one.
    A user's function keeps the algorithm's other defaults."""
    for name, chosen in (("advantage.estimator", train.advantage.estimator), ("loss.policy", train.loss.policy)):
        preset = ALGORITHMS[train.algorithm].get(f"train.{name}", chosen)
        if chosen != preset and ".py:" not in chosen:
            # grpo is the default, and accepts any
            others = (other for other, fields in ALGORITHMS.items() if fields.get(f"train.{name}") == chosen)
            problem = f"got {train.algorithm!r}, which is {name}={preset}, with {name}={chosen}"
            raise SettingError("train.algorithm", problem, f"use {next(others, 'grpo')}, or remove {name}")


def _check_unused(recipe: Recipe) -> None:
    """Raise SettingError for a changed field that would have no effect."""
    train = recipe.train
    sft, optimizer, distance = train.algorithm == "sft", train.optimizer.name, train.loss.kl
    judged = train.advantage.estimator != "none"
    advantages = judged or recipe.teacher is None or recipe.teacher.is_sampled
    needs = {
        "train.decay_steps": (train.schedule == "wsd", "train.schedule=wsd"),
        "train.optimizer.betas": (optimizer != "adafactor", "another optimizer than adafactor"),
        "train.optimizer.eps": (optimizer.startswith("adamw") or optimizer == "muon", "adamw, adamw_8bit or muon"),
        "train.min_reward": (sft and train.from_trajectories is not None, "sft on train.from_trajectories"),
        "train.advantage": (not sft, "a reinforcement learning algorithm"),
        "train.advantage.malformed_turns": (sft or judged, "an algorithm that learns from rewards"),
        "train.loss": (not sft, "a reinforcement learning algorithm"),
        "train.overlong": (not sft and judged, "an algorithm that learns from rewards"),
        "train.loss.top_entropy": (judged, "an algorithm that learns from rewards"),
        "train.loss.policy": (advantages, "rewards or teacher.divergence=sampled"),
        "train.loss.mismatch": (advantages, "rewards or teacher.divergence=sampled"),
        "train.stop_when": (not sft, "a reinforcement learning algorithm"),
        "train.loss.kl.estimator": (distance.coefficient > 0, "train.loss.kl.coefficient > 0"),
        "train.loss.kl.place": (distance.coefficient > 0, "train.loss.kl.coefficient > 0"),
    }
    for name, (used, with_what) in needs.items():
        section: Any = train
        *path, last = name.split(".")[1:]
        for key in path:
            section = getattr(section, key)
        value, default = getattr(section, last), type(section).model_fields[last].default
        if not used and value not in (default, ALGORITHMS[train.algorithm].get(name, default)):
            shown = "a setting" if isinstance(value, BaseModel) else short(value)
            problem = f"got {shown}, which has an effect only with {with_what}"
            raise SettingError(name, problem, "remove it, or change that")
    order = ordered_by(recipe)
    for symptom in (Symptom.SUCCESS, Symptom.UNSTABLE):
        if order is not None and symptom in train.stop_when:
            problem = f"got {symptom.value!r}, which is not reported with {order}: later tasks may be harder"
            raise SettingError("train.stop_when", problem, "remove it, or change that")


def _check_mismatch(recipe: Recipe) -> None:
    """If server and trainer compute with different weights, require a correction for the server's sampling."""
    if recipe.train.loss.mismatch.correction != "none":
        return
    precision = recipe.train.precision
    for name, value in {**recipe.rounding, **({} if precision == "auto" else {"train.precision": precision})}.items():
        problem = f"got 'none' with {name}={value}: the server computes with other weights or in another precision"
        raise SettingError(
            "train.loss.mismatch.correction", problem, "use token_truncate, the default, or another correction"
        )


def _check_adapted_tower(recipe: Recipe) -> None:
    """Check that a vLLM server started here applies the adapter's weights in the vision tower. By default, it answers
    200 and drops them."""
    adapted, server = recipe.model.lora is not None and recipe.train.trains_vision, recipe.server
    if adapted and server.engine == "vllm" and server.url is None and ADAPTED_TOWER not in server.vllm.args:
        problem = "got trained with model.lora, and vLLM drops the adapter's weights in the vision tower"
        raise SettingError("train.vision", problem, f"add {ADAPTED_TOWER} to server.options.args, or use frozen")


def _check_full_weights(recipe: Recipe) -> None:
    """Check that a server started here can receive full weights and verify them."""
    server = recipe.server
    if server.model is not None:
        raise SettingError(
            "server.model",
            f"got {server.model!r}, a copy that cannot receive full weights",
            "train an adapter (model.lora.rank), or remove it",
        )
    if server.quantization is not None:
        raise SettingError(
            "server.quantization",
            f"got {server.quantization!r}, which cannot receive full weights",
            "train an adapter (model.lora.rank), or remove it",
        )


def _check_merged_base(recipe: Recipe) -> None:
    """Check that the server can have the base with the merged adapter, which the run itself makes."""
    server = recipe.server
    if not (recipe.model.lora and recipe.model.lora.merge):
        return
    fix = "`agentfactory export` the adapter merged, and make that model.path, without model.lora.from; or remove it"
    for name, value in (("model", server.model), ("url", server.url)):
        if value is not None:
            problem = f"got {short(value)}, which serves the base without the adapter that the run merges into it"
            raise SettingError(f"server.{name}", problem, fix)

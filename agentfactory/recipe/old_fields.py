"""Fields that recipes had up to version 0.1, and what they are now."""

import warnings
from collections.abc import Iterator
from typing import Any

from agentfactory.rollout.config import AgentConfig, ContextConfig, ServerConfig
from agentfactory.tools.config import Choice
from agentfactory.trainers.config import AdvantageConfig, LossConfig, MismatchConfig

MOVED = {
    f"{section}.{name}": f"{section}.options.{name}"
    for section, names in {
        "rollout.agent": "disk_mb env keep_workspaces memory_mb processes readable sandbox workspace",
        "rollout.context": "keep_turns max_tokens prompt",
        "server": "args data_parallel_size gpu_memory_utilization python tensor_parallel_size",
        "train.advantage": "anchors gae_lambda gamma scale step_weight",
        "train.loss": "clip_high clip_low dual_clip",
        "train.loss.mismatch": "high low",
    }.items()
    for name in names.split()
} | {
    "train.critic.learning_rate": "train.advantage.options.critic_learning_rate",
    "train.critic.value_clip": "train.advantage.options.value_clip",
    "train.critic.warmup_steps": "train.advantage.options.critic_warmup_steps",
    "train.loss.sapo_negative": "train.loss.options.negative_temperature",
    "train.loss.sapo_positive": "train.loss.options.positive_temperature",
}
"""Old field -> the same value's field now."""

CHOICES: dict[str, type[Choice]] = {
    "rollout.agent": AgentConfig,
    "rollout.context": ContextConfig,
    "server": ServerConfig,
    "train.advantage": AdvantageConfig,
    "train.loss": LossConfig,
    "train.loss.mismatch": MismatchConfig,
}
"""Sections that choose something which has options."""
GONE = {
    "server.max_loras": (
        4,
        "a server holds as many adapters as rollout.max_staleness needs (vLLM: --max-loras among server.options.args)",
    ),
}
"""Old field -> its default, and what holds instead."""


def renew(data: dict[str, Any], source: str | None = None) -> None:
    """Rewrite the old fields of a recipe, or of a part of one, in place.

    `source` is what contains them, as a person knows it: a FutureWarning says what to write there now. A recipe that a
    run has saved contains every field, also those that it does not use: their defaults are left out.
    """
    told = [*_replaced(data)]
    for old, new in MOVED.items():
        for value in _take(data, old.split(".")):
            takes, default = _takes(data, new)
            if takes or value != default:
                _put(data, new.split("."), value)
            if value != default:
                told.append(f"{new} instead of {old}")
    for old, (default, now) in GONE.items():
        told += [f"nothing for {old}: {now}" for value in _take(data, old.split(".")) if value != default]
    if told and source is not None:
        warnings.warn(f"{source}: fields have changed: write {'; '.join(told)}", FutureWarning, stacklevel=2)


def _replaced(data: dict[str, Any]) -> Iterator[str]:
    """Rewrite the fields that have another form now; yield what to write."""
    for options in _take(data, ["rollout", "agent", "outside"]):
        if options is not None:
            _put(data, ["rollout", "agent", "name"], "outside")
            _put(data, ["rollout", "agent", "options"], options)
            yield "rollout.agent: {name: outside, options: {...}} instead of rollout.agent.outside"
    rollout = data.get("rollout")
    if isinstance(rollout, dict) and isinstance(rollout.get("curriculum"), dict):
        visit = rollout["curriculum"].get("visit", 0.25)
        rollout["curriculum"] = visit
        yield f"rollout.curriculum: {visit} instead of rollout.curriculum.visit; its bounds are 0.05 and 0.95"
    for groups in _take(data, ["train", "optimizer", "groups"]):
        for group in groups if isinstance(groups, list) else ():
            if isinstance(group, dict) and group.get("learning_rate") is not None:
                _put(data, ["train", "optimizer", "learning_rates", str(group.get("match"))], group["learning_rate"])
            yield "train.optimizer.learning_rates: {PATTERN: RATE} instead of train.optimizer.groups"
    for offload in _take(data, ["train", "activation_offload"]):
        if offload is True:
            _put(data, ["train", "gradient_checkpointing"], "offload")
            yield "train.gradient_checkpointing: offload instead of train.activation_offload"
    for rate in _take(data, ["train", "vision_learning_rate"]):
        if rate is not None:
            _put(data, ["train", "vision"], rate)
            yield f"train.vision: {rate} instead of train.vision_learning_rate"


def _takes(data: dict[str, Any], field: str) -> tuple[bool, Any]:
    """Return whether what `data` chooses may take the option `field`, and the option's default."""
    path, _, name = field.partition(".options.")
    given: Any = data
    for key in path.split("."):
        given = given.get(key) if isinstance(given, dict) else None
    section = CHOICES[path]
    default = next(kind.model_fields[name].default for kind in section.kinds.values() if name in kind.model_fields)
    choice = section.choice(given) if isinstance(given, dict) else None
    if choice is None:
        return True, default  # it may stand in another file
    kind = section.options_type(choice)
    return kind is not None and name in kind.model_fields, default


def _take(data: Any, keys: list[str]) -> list[Any]:
    """Remove the field and return its values; '*' is every entry."""
    key, *rest = keys
    if not isinstance(data, dict):
        return []
    if rest:
        found = [value for entry in ([*data] if key == "*" else [key]) for value in _take(data.get(entry), rest)]
        if data.get(key) == {} and found:
            del data[key]  # a section that had only this
        return found
    return [data.pop(key)] if key in data else []


def _put(data: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        below = data.get(key)
        if not isinstance(below, dict):
            below = data[key] = {}
        data = below
    data[keys[-1]] = value

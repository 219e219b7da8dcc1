"""Recipe fields of versions up to 0.1, and their replacements."""

import warnings
from collections import defaultdict
from typing import Any

from agentfactory.base.errors import SettingError, short
from agentfactory.recipe.choices import CHOICES, has_option, value_at

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
"""Old field -> current field of the same value."""

_NONE = object()
_LORAS = 4
"""Default of the old server.max_loras; a server still holds at least as many adapters."""


class OldFieldWarning(FutureWarning):
    """A warning about deprecated fields in a recipe."""


def renew(data: dict[str, Any], origins: dict[str, str] | None = None) -> None:
    """Rewrite the old fields of a whole recipe in place.

    `origins` maps each dotted leaf to its source, in the order of setting; a warning per source names the new fields.
    Without `origins`, the recipe was saved by a run, and has every field, used or not: old fields with default values
    are dropped.

    Raises SettingError for an old field that contradicts a new one, or whose value no current field allows.
    """
    told: dict[str, list[str]] = defaultdict(list)

    def note(old: str, new: str | None, text: str | None) -> None:
        if origins is None:
            return
        source = _origin(origins, old)
        if new is not None:
            origins[new] = source
        if text is not None:
            told[source].append(text)

    _renew_outside(data, note)
    for old, new in MOVED.items():
        value = _take(data, old, new, origins)
        path, _, name = new.partition(".options.")
        default = _is_default(value, new)
        if value is _NONE or (default and not has_option(data, path, name)):
            continue
        if _put(data, new, value):
            note(old, new, None if default else f"{new} instead of {old}")
    if value_at(data, "train.critic") == {}:
        _pop(data, "train.critic")
    _renew_offload(data, note, origins)
    _renew_vision(data, note, origins)
    _drop_ages(data)
    value = _take(data, "server.max_loras", "", origins)
    if value is not _NONE and type(value) is not int:
        raise SettingError("server.max_loras", f"got {short(value)}", "remove it: this field no longer exists")
    if value not in (_NONE, _LORAS):
        text = "nothing for server.max_loras: a server holds as many adapters as rollout.max_staleness needs"
        note("server.max_loras", None, f"{text} (vLLM: --max-loras among server.options.args)")
    for section in (value_at(data, path) for path in CHOICES if origins is None):
        if isinstance(section, dict):
            section.setdefault("options", {})  # as it is saved now
    for source, texts in told.items():
        text = f"{source}: fields have changed: write {'; '.join(dict.fromkeys(texts))}"
        warnings.warn(text, OldFieldWarning, stacklevel=2)


def _renew_outside(data: dict[str, Any], note: Any) -> None:
    if not _has(data, "rollout.agent.outside"):
        return
    options = _pop(data, "rollout.agent.outside")
    if options is None:
        return
    name = value_at(data, "rollout.agent.name")
    if name not in (None, "outside") or value_at(data, "rollout.agent.options") not in (None, {}):
        raise SettingError("rollout.agent.outside", f"got {short(options)} with another agent", "remove one of the two")
    _put(data, "rollout.agent.name", "outside")
    _put(data, "rollout.agent.options", options)
    text = "rollout.agent: {name: outside, options: {...}} instead of rollout.agent.outside"
    note("rollout.agent.outside", "rollout.agent.options", text)


def _renew_offload(data: dict[str, Any], note: Any, origins: dict[str, str] | None) -> None:
    old, new = "train.activation_offload", "train.gradient_checkpointing"
    value, kept = _take(data, old, "", origins), value_at(data, new)
    if value is _NONE:
        return
    if not isinstance(value, bool):
        raise SettingError(old, f"got {short(value)}, not true or false", f"write {new}: offload, or remove it")
    if value and kept not in (True, "offload"):
        raise SettingError(old, f"got true, which has an effect only with {new}", f"write {new}: offload instead")
    if value:
        _put(data, new, "offload")
        note(old, new, f"{new}: offload instead of {old}")


def _renew_vision(data: dict[str, Any], note: Any, origins: dict[str, str] | None) -> None:
    old, new = "train.vision_learning_rate", "train.vision"
    kept = value_at(data, new)
    # a number under the new name is the same setting; a string is not
    rate = _take(data, old, new if type(kept) in (int, float) else "", origins)
    if rate in (_NONE, None):
        return
    if type(rate) not in (int, float) or kept in (None, "frozen"):
        problem = f"got {short(rate)}, and {new} is {short(kept)}"
        raise SettingError(old, problem, f"write the learning rate as {new} instead, or remove it")
    _put(data, new, rate)
    note(old, new, f"{new}: {rate} instead of {old}")


def _drop_ages(data: dict[str, Any]) -> None:
    servers = data.get("mcp_servers")
    for name, server in servers.items() if isinstance(servers, dict) else ():
        pool = server.get("pool") if isinstance(server, dict) else None
        age = pool.pop("max_seconds", None) if isinstance(pool, dict) else None
        if age is not None:
            field = f"mcp_servers.{name}.pool.max_seconds"
            raise SettingError(field, f"got {short(age)}, and instances have no age any more", "set max_uses instead")


def _take(data: dict[str, Any], old: str, new: str, origins: dict[str, str] | None) -> Any:
    """Remove an old field and return its value; _NONE if there is none, or if a later recipe has set the field `new`.
    Raises SettingError if one source sets both."""
    if not _has(data, old):
        return _NONE
    value = _pop(data, old)
    if not new or origins is None or not _has(data, new):
        return value
    if _origin(origins, old) == _origin(origins, new):
        problem = f"got {short(value)}, and {new} is {short(value_at(data, new))}"
        raise SettingError(old, problem, f"remove {old}, which is {new} now", source=_origin(origins, old))
    return _NONE if _time(origins, old) < _time(origins, new) else value


def _is_default(value: Any, field: str) -> bool:
    path, _, name = field.partition(".options.")
    kinds = CHOICES[path].kinds.values()
    default = next(kind.model_fields[name].default for kind in kinds if name in kind.model_fields)
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)


def _origin(origins: dict[str, str], name: str) -> str:
    return next((source for leaf, source in origins.items() if f"{leaf}.".startswith(f"{name}.")), "recipe")


def _time(origins: dict[str, str], name: str) -> int:
    """Return the position in `origins` at which the field was set last; -1 if it was not."""
    return max((n for n, leaf in enumerate(origins) if f"{leaf}.".startswith(f"{name}.")), default=-1)


def _has(data: dict[str, Any], path: str) -> bool:
    section, _, name = path.rpartition(".")
    found = value_at(data, section)
    return isinstance(found, dict) and name in found


def _pop(data: dict[str, Any], path: str) -> Any:
    section, _, name = path.rpartition(".")
    return value_at(data, section).pop(name)


def _put(data: dict[str, Any], path: str, value: Any) -> bool:
    """Set a field. Return False, and set nothing, if another value than a section is in its place."""
    *keys, last = path.split(".")
    for key in keys:
        if data.get(key) is None:
            data[key] = {}
        if not isinstance(data[key], dict):
            return False
        data = data[key]
    data[last] = value
    return True

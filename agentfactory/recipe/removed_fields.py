"""Fields that recipes had before: saved recipes with the old default load, and errors say what to do instead."""

import re
from collections.abc import Iterator
from typing import Any

from agentfactory.recipe.choices import places, value_at
from agentfactory.rollout.config import ContextConfig

_KEPT = "remove it; a reward gets the folder, and can copy what it wants to keep"
_FIXED = "remove it: this is {} now"
_REMOVED: dict[str, tuple[Any, str]] = {
    "mcp_servers.*.cache": (0, "remove it: results are not cached"),
    "mcp_servers.*.keep_workspaces": (None, "remove it: a tool of the server can copy what is to be kept"),
    "mcp_servers.*.pool.wait_seconds": (600.0, _FIXED.format("600")),
    "limits.parallel_calls": (None, "remove it: the calls of a turn run together; limits.calls_per_turn bounds them"),
    "limits.result_bytes": (1 << 20, _FIXED.format("1 MiB")),
    "limits.on_breach.*.penalty": (0.0, "remove it; a reward finds refused calls in trajectory.errors"),
    "model.lora.dropout": (0.0, _FIXED.format("0")),
    "rewards.*.name": (None, "remove it: the second reward of a name is called NAME_2"),
    "rollout.agent.options.disk_mb": (4096, _FIXED.format("4096")),
    "rollout.agent.options.fields": (None, "remove it: programs get the whole row"),
    "rollout.agent.options.keep_workspaces": (None, _KEPT),
    "rollout.agent.options.processes": (256, _FIXED.format("256")),
    "rollout.context.max_tokens": (None, _FIXED.format("three quarters of rollout.max_total_tokens")),
    "rollout.context.options": ({}, "write its fields in rollout.context"),
    "rollout.context.prompt": (ContextConfig.prompt, "remove it: the prompt is fixed"),
    "teacher.options.beta": (0.5, _FIXED.format("0.5")),
    "teacher.options": ({}, "remove it: jensen_shannon compares both with their mean (beta = 0.5)"),
    "track.project": ("agentfactory", "set WANDB_PROJECT, TRACKIO_PROJECT or MLFLOW_EXPERIMENT_NAME instead"),
    "train.advantage.options.anchors": (
        "environment",
        "remove it: observations count without an environment's",
    ),
    "train.advantage.options.step_weight": (1.0, _FIXED.format("1")),
    "train.advantage.options.value_clip": (0.2, _FIXED.format("0.2")),
    "train.advantage.per_source": (False, "remove it; give the sources' rewards weights, or compare within groups"),
    "train.loss.options.negative_temperature": (1.05, _FIXED.format("1.05")),
    "train.loss.options.positive_temperature": (1.0, _FIXED.format("1")),
    "train.optimizer.eps": (1e-8, _FIXED.format("1e-8")),
    "train.optimizer.groups": ([], "remove it: only the critic and the vision tower have rates of their own"),
    **{
        f"{section}.curriculum.{name}": (value, _FIXED.format(value))
        for section in ("data", "rollout")
        for name, value in (("solved", 0.95), ("hopeless", 0.05))
    },
    "rollout.agent.options.token_env": ("AGENTFACTORY_TOKEN", _FIXED.format("AGENTFACTORY_TOKEN")),
    "server.startup_seconds": (600.0, _FIXED.format("1800")),
    "server.options.attach_key_env": (None, "write server.api_key_env"),
    "server.options.mem_fraction_static": (None, "write gpu_memory_utilization"),
    "track.credit": (True, "remove it: it is always on"),
}
"""Field, with * for one name or place -> the default with which runs have saved it, and the fix."""
_SOURCE = re.compile(r"^(eval\.)?data\.sources\.\w+\.")


def fix_of_removed(name: str) -> str | None:
    """Return what to do about the field `name` if recipes had it before, else None."""
    own = _SOURCE.sub("", name)
    for known, (_, fix) in _REMOVED.items():
        pattern = re.escape(known).replace(r"\*", r"[^.]+")
        # a source of tasks has settings of `rollout` itself
        if re.fullmatch(pattern, own) or (own != name and re.fullmatch(pattern, f"rollout.{own}")):
            return fix
    return None


def drop_removed(recipe: Any) -> None:
    """Remove fields from a recipe's mapping that recipes had before, if they have the default of then."""
    for context in _contexts(recipe):
        if isinstance(context.get("options"), dict):
            # its options became its fields
            context |= context.pop("options") | context
    for place in (recipe, *_sources(recipe)):
        for known, (value, _) in _REMOVED.items():
            # a source of tasks has settings of `rollout` itself
            for section, name in places(place, known.removeprefix("" if place is recipe else "rollout.").split(".")):
                given = section[name]
                if given == value and isinstance(given, bool) == isinstance(value, bool):
                    del section[name]


def complete_saved(recipe: Any) -> None:
    """Drop removed fields of a saved recipe, and set those that it lacks to what its run was trained with."""
    drop_removed(recipe)
    for context in _contexts(recipe):
        context.setdefault("keep_turns", 2)


def _contexts(recipe: Any) -> Iterator[dict[str, Any]]:
    found = [value_at(recipe, "rollout.context"), *(value_at(source, "context") for source in _sources(recipe))]
    yield from (context for context in found if isinstance(context, dict))


def _sources(recipe: Any) -> list[Any]:
    found = [value_at(recipe, f"{section}.sources") for section in ("data", "eval.data")]
    return [entry for entries in found if isinstance(entries, list) for entry in entries]

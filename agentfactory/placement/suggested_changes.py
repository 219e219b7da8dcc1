"""Suggested changes for a recipe that does not fit: the fewest settings that make it fit, and the resulting memory."""

import json
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.placement.machine import Machine
from agentfactory.placement.plan_choice import Estimate, Plan, choose, gib
from agentfactory.recipe.schema import Recipe
from agentfactory.trainers.sync.backends import backend_of

Settings = dict[str, Any]
"""Dotted fields and their values, as on the command line."""

_RANK = 16


def refusal(recipe: Recipe, tried: list[Plan], machine: Machine, estimate: Estimate) -> SettingError:
    """Return the error that explains why none of the tried plans fits, with the nearest change that makes one fit."""
    problem = "; ".join(f"does not fit, {plan.title}: {plan.worst}" for plan in tried)
    return SettingError("placement.mode", problem, _advice(recipe, machine, estimate))


def _advice(recipe: Recipe, machine: Machine, estimate: Estimate) -> str:
    def plan_with(settings: Settings) -> Plan | None:
        data = recipe.model_dump(mode="json")
        for name, value in settings.items():
            *path, last = name.split(".")
            section = data
            for key in path:
                section = section[key]
            section[last] = value
        changed = Recipe.model_validate_json(json.dumps(data), strict=True)
        # changes that need an adapter count only together with one
        if not settings or (changed.server.quantization == "fp8" and changed.model.lora is None):
            return None
        try:
            tried = choose(changed, machine, estimate)
        except SettingError:
            return None
        return min(tried, key=lambda plan: plan.worst.short)

    best: tuple[Plan, Settings] | None = None
    for settings, plan in _combined(_ways(recipe), plan_with):
        if plan.fits:
            return f"{_written(settings)}: then {gib(plan.worst.total)}{plan.worst.of}"
        if best is None or plan.worst.short < best[0].worst.short:
            best = plan, settings
    smaller = "a smaller model, or a larger or additional GPU"
    if best is None:
        return smaller
    return f"{smaller}: even with {_written(best[1])} it takes {gib(best[0].worst.total)} GiB"


def _combined(
    ways: list[list[Settings]], plan_with: Callable[[Settings], Plan | None]
) -> Iterator[tuple[Settings, Plan]]:
    """Yield combinations of ways, the smallest first; of each way, the smallest change that still fits."""
    for size in range(1, len(ways) + 1):
        for chosen in combinations(ways, size):
            strongest = [way[-1] for way in chosen]
            settings = _merged(strongest)
            if (plan := plan_with(settings)) is None:
                continue
            for index, way in enumerate(chosen) if plan.fits else ():
                for mild in way[:-1]:
                    milder = _merged([*strongest[:index], mild, *strongest[index + 1 :]])
                    if (found := plan_with(milder)) is not None and found.fits:
                        strongest[index], settings, plan = mild, milder, found
                        break
            yield settings, plan


def _merged(parts: list[Settings]) -> Settings:
    """Return all settings together; nothing if two of them conflict."""
    merged: Settings = {}
    for part in parts:
        if any(merged.get(name, value) != value for name, value in part.items()):
            return {}
        merged |= part
    return merged


def _written(settings: Settings) -> str:
    def value(setting: Any) -> str:
        if isinstance(setting, dict):
            return "{" + ", ".join(f"{key}: {inner}" for key, inner in setting.items()) + "}"
        return json.dumps(setting) if isinstance(setting, bool | None) else str(setting)

    parts = (f"{name}={value(setting)}" for name, setting in settings.items())
    return " ".join(f'"{part}"' if " " in part else part for part in parts)


def _halved(start: int, least: int) -> list[int]:
    values = []
    while start > least:
        start = max(start // 2, least)
        values.append(start)
    return values


def _ways(recipe: Recipe) -> list[list[Settings]]:
    """Return the ways to lower the memory of a recipe: settings, the mildest first; first ways that only cost speed."""
    train, server, lora, mode = recipe.train, recipe.server, recipe.model.lora, recipe.placement.mode
    started, late = server.url is None, {"rollout.max_staleness": 0} if recipe.rollout.max_staleness else {}
    ways: list[list[Settings]] = []
    if server.vllm.gpu_memory_utilization is not None:
        ways.append([{"server.options.gpu_memory_utilization": None}])
    # a row is never cut: going below its length gains nothing
    least = max(1024, recipe.rollout.max_total_tokens)
    ways.append([{"train.token_budget": size} for size in _halved(train.token_budget, least)])
    if not train.gradient_checkpointing:
        ways.append([{"train.gradient_checkpointing": True}])
    if mode == "split" or (mode == "auto" and late and train.processes == 1):
        ways.append([{"placement.mode": "time_share", **late}])
    if server.engine == "vllm" and started and server.quantization is None and server.model is None:
        ways.append([{"server.quantization": "fp8"}])
    backend = {} if recipe.sync.backend == "auto" or backend_of(recipe).adapters else {"sync.backend": "auto"}
    if lora is None:
        ways.append([{"model.lora": {"rank": _RANK}, **backend}])
    if not train.is_sharded and lora is None:
        ways.append([{"model.lora": {"rank": _RANK, "quantization": "nf4"}, **backend}])
    if not train.is_sharded and lora is not None and lora.quantization is None:
        ways.append([{"model.lora.quantization": "nf4"}])
    if server.engine == "embedded" and started:
        fewest = min(recipe.largest_group, server.max_num_seqs)
        ways.append([{"server.max_num_seqs": count} for count in _halved(server.max_num_seqs, fewest)])
    return [way for way in ways if way]

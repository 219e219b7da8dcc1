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

_SMALLEST_BUDGET = 1024
_RANK = 16


def refusal(recipe: Recipe, tried: list[Plan], machine: Machine, estimate: Estimate) -> SettingError:
    """Return the error that explains, with the sums, why none of the tried plans fits, and names the nearest change
    that makes one fit."""
    problem = "; ".join(f"does not fit, {plan.title}: {plan.worst}" for plan in tried)
    return SettingError("placement.mode", problem, _advice(recipe, machine, estimate))


def _advice(recipe: Recipe, machine: Machine, estimate: Estimate) -> str:
    def plan_with(settings: Settings) -> Plan | None:
        changed = _changed(recipe, settings)
        # changes that need an adapter count only together with one
        if changed.server.quantization == "fp8" and changed.model.lora is None:
            return None
        try:
            tried = choose(changed, machine, estimate)
        except SettingError:
            return None
        return min(tried, key=lambda plan: plan.worst.short)

    ways = [found for way in _WAYS if (found := way(recipe))]
    best: tuple[Plan, Settings] | None = None
    for settings, plan in _combined(ways, plan_with):
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
            plan = plan_with(settings) if settings is not None else None
            if settings is None or plan is None:
                continue
            for index, way in enumerate(chosen) if plan.fits else ():
                for mild in way[:-1]:
                    milder = _merged([*strongest[:index], mild, *strongest[index + 1 :]])
                    found = plan_with(milder) if milder is not None else None
                    if milder is not None and found is not None and found.fits:
                        strongest[index], settings, plan = mild, milder, found
                        break
            yield settings, plan


def _merged(parts: list[Settings]) -> Settings | None:
    """Return all settings together; None if two of them conflict."""
    merged: Settings = {}
    for part in parts:
        if any(merged.get(name, value) != value for name, value in part.items()):
            return None
        merged |= part
    return merged


def _changed(recipe: Recipe, settings: Settings) -> Recipe:
    data = recipe.model_dump(mode="json")
    for name, value in settings.items():
        *path, last = name.split(".")
        section = data
        for key in path:
            section = section[key]
        section[last] = value
    return Recipe.model_validate_json(json.dumps(data), strict=True)


def _written(settings: Settings) -> str:
    """Return the settings as overrides on the command line."""

    def value(setting: Any) -> str:
        if isinstance(setting, dict):
            return "{" + ", ".join(f"{key}: {inner}" for key, inner in setting.items()) + "}"
        return json.dumps(setting) if isinstance(setting, bool | None) else str(setting)

    parts = (f"{name}={value(setting)}" for name, setting in settings.items())
    return " ".join(f'"{part}"' if " " in part else part for part in parts)


def _halved(start: int, least: int) -> list[int]:
    """Return half of `start`, half of that, and so on, down to `least`."""
    values = []
    while start > least:
        start = max(start // 2, least)
        values.append(start)
    return values


def _no_share(recipe: Recipe) -> list[Settings]:
    return (
        [] if recipe.server.vllm.gpu_memory_utilization is None else [{"server.options.gpu_memory_utilization": None}]
    )


def _smaller_budget(recipe: Recipe) -> list[Settings]:
    # a row is never cut: going below its length gains nothing
    least = max(_SMALLEST_BUDGET, recipe.rollout.max_total_tokens)
    return [{"train.token_budget": size} for size in _halved(recipe.train.token_budget, least)]


def _recomputed_layers(recipe: Recipe) -> list[Settings]:
    return [] if recipe.train.gradient_checkpointing else [{"train.gradient_checkpointing": True}]


def _in_turns(recipe: Recipe) -> list[Settings]:
    mode, late = recipe.placement.mode, recipe.rollout.max_staleness > 0
    if mode == "split" or (mode == "auto" and late and recipe.train.processes == 1):
        return [{"placement.mode": "time_share", **({"rollout.max_staleness": 0} if late else {})}]
    return []


def _quantised_server(recipe: Recipe) -> list[Settings]:
    server = recipe.server
    if server.engine == "vllm" and server.url is None and server.quantization is None and server.model is None:
        return [{"server.quantization": "fp8"}]
    return []


def _for_adapter(recipe: Recipe) -> Settings:
    return {} if recipe.sync.backend == "auto" or backend_of(recipe).adapters else {"sync.backend": "auto"}


def _adapter(recipe: Recipe) -> list[Settings]:
    return [] if recipe.model.lora else [{"model.lora": {"rank": _RANK}, **_for_adapter(recipe)}]


def _adapter_on_four_bits(recipe: Recipe) -> list[Settings]:
    lora = recipe.model.lora
    if recipe.train.strategy == "fsdp2" or (lora is not None and lora.quantization is not None):
        return []
    if lora is not None:
        return [{"model.lora.quantization": "nf4"}]
    return [{"model.lora": {"rank": _RANK, "quantization": "nf4"}, **_for_adapter(recipe)}]


def _fewer_sequences(recipe: Recipe) -> list[Settings]:
    if recipe.server.engine != "embedded" or recipe.server.url is not None:
        return []
    least = min(recipe.largest_group, recipe.server.max_num_seqs)
    return [{"server.max_num_seqs": count} for count in _halved(recipe.server.max_num_seqs, least)]


_WAYS = (
    _no_share,
    _smaller_budget,
    _recomputed_layers,
    _in_turns,
    _quantised_server,
    _adapter,
    _adapter_on_four_bits,
    _fewer_sequences,
)
"""Recipe -> settings that lower its memory, the mildest first; empty if there are none. They are tried in this order:
those that cost speed come before those that cost precision or change what is trained."""

"""`python -m agentfactory.placement`: plan the placement of recipes for the launcher, which does not import torch.

It reads {"recipes": [...], "purpose": train or serve, "machines": N} from stdin, and writes a list of
launching.placement.Placement's fields to stdout. To serve, a trainer without the server's GPU does not count."""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from agentfactory.base.config import Section
from agentfactory.base.errors import SettingError
from agentfactory.base.processes import parent_watch
from agentfactory.placement.machine import Machine, see_machine
from agentfactory.placement.meta_model import difference, load_config
from agentfactory.placement.plan_choice import Device, Estimate, Need, Plan, choose, table
from agentfactory.placement.server_memory import ServerMemory, server_memory
from agentfactory.placement.suggested_changes import refusal
from agentfactory.placement.trainer_memory import trainer_memory
from agentfactory.recipe.checks import runs_chains
from agentfactory.recipe.schema import Recipe


class Estimates:
    """Estimates of the memory of recipes, cached for the search for a change that fits."""

    def __init__(self, purpose: str, gpus: int):
        self._purpose = purpose
        self._gpus = gpus
        self._known: dict[str, Any] = {}

    def __call__(self, recipe: Recipe, device: Device, memory: int | None) -> Need:
        """Return the memory that a recipe needs. Raises SettingError if its models' shapes do not suit it."""
        config, note = self._config("model.path", recipe.model.path)
        notes = [note] if note else []
        trainer: dict[str, int] = {}
        if self._purpose == "train" or recipe.placement.mode in ("split", "time_share"):
            teacher = recipe.teacher
            loaded = teacher.model if teacher is not None else None
            graded_by = self._config("teacher.model", loaded)[0] if loaded is not None else None
            key = _key(f"trainer {device}", recipe.model, recipe.train, recipe.rollout, *([teacher] if teacher else []))
            trainer = self._once(key, lambda: trainer_memory(recipe, config, device, graded_by, self._gpus))
            kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - {"full_attention"}
            if recipe.train.batching == "auto" and kinds:
                notes.append(f"rows are padded: {recipe.model.path} has layers of {', '.join(sorted(kinds))}")
        server: ServerMemory | None = None
        if recipe.server.starts and (self._purpose == "serve" or runs_chains(recipe, "train")):
            served = None
            if recipe.server.model is not None:
                served, note = self._config("server.model", recipe.server.model)
                notes += [note] if note else []
                same = partial(difference, config, served)
                if (found := self._once(_key("difference", recipe.server.model), same)) is not None:
                    problem = f"got {recipe.server.model}, which is not a copy of {recipe.model.path}: {found}"
                    raise SettingError("server.model", problem, "name a quantised copy of model.path, or remove it")
            key = _key(f"server {device} {memory}", recipe.model, recipe.server, recipe.rollout)
            server = self._once(key, lambda: server_memory(recipe, config, device, served, memory))
        return Need(trainer, server, tuple(notes))

    def _config(self, field: str, path: str) -> tuple[PreTrainedConfig, str | None]:
        try:
            return self._once(_key("config", path), lambda: load_config(path))
        except ValueError as error:
            fix = "connect this machine, download the model first, or name a folder"
            raise SettingError(field, str(error), fix) from error

    def _once(self, key: str, compute: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]


def _key(kind: str, *parts: Section | str) -> str:
    return "\n".join([kind, *(part if isinstance(part, str) else part.model_dump_json() for part in parts)])


def place(recipe: Recipe, machine: Machine, estimates: Estimate) -> dict[str, Any]:
    answer: dict[str, Any] = {"on_gpu": bool(machine.gpus)}
    try:
        tried = choose(recipe, machine, estimates)
        plan = tried[-1]
        answer |= {"mode": plan.mode, "table": table(plan, recipe)}
        settings = _settings(plan, bool(machine.gpus))
        if not plan.fits:
            unfit = refusal(recipe, tried, machine, estimates)
            if recipe.placement.on_misfit == "refuse":
                fix = f"{unfit.fix}; or placement.on_misfit=warn, to try it anyway"
                raise SettingError(unfit.field, unfit.problem, fix)
            settings |= {"warning": f"{unfit.problem}; to make it fit: {unfit.fix}", "trainer_bytes": 0}
    except SettingError as refused:
        return answer | {"refused": (refused.field, refused.problem, refused.fix)}
    return answer | settings


def _settings(plan: Plan, on_gpu: bool) -> dict[str, Any]:
    """Return the settings of the processes; empty if the plan is for a GPU of another machine."""
    if not on_gpu:
        return {}
    shared = plan.mode in ("split", "time_share") and plan.need.server is not None
    found = {name: size for part in plan.sums[:2] for name, size in part.terms.items()}
    return {
        "trainer_devices": _visible(plan.trainer_gpus),
        "server_devices": _visible(plan.server_gpus),
        "gpu_memory_utilization": plan.utilization,
        "sync": plan.sync,
        # with time_share, the server is awake when the trainer starts
        "trainer_bytes": found["trainer" if plan.mode == "split" else "offloaded trainer"] if shared else 0,
    }


def _visible(gpus: tuple[int, ...]) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for these indices of visible GPUs; None: unchanged."""
    if not gpus:
        return None
    seen = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return ",".join(seen[gpu] if seen else str(gpu) for gpu in gpus)


def main() -> None:
    parent_watch.follow_parent()
    # libraries may print, which must not reach stdout
    with contextlib.redirect_stdout(sys.stderr):
        asked = json.load(sys.stdin)
        machine = see_machine(asked["machines"])
        estimates = Estimates(asked["purpose"], len(machine.gpus))
        recipes = [Recipe.model_validate_json(json.dumps(recipe), strict=True) for recipe in asked["recipes"]]
        answers = [place(recipe, machine, estimates) for recipe in recipes]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

"""A recipe's placement for the launcher: planned by a child process, so that this process does not import torch."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentfactory.base.errors import SettingError
from agentfactory.base.processes import parent_watch
from agentfactory.base.processes.devices import may_have_gpu
from agentfactory.recipe.schema import Recipe, updated
from agentfactory.rollout.inference.server_command_line import server_command
from agentfactory.trainers.sync.backends import backend_of


class PlacementError(Exception):
    """Processes could not be placed, or the planned memory is no longer free; the message gives the reason."""


@dataclass(frozen=True)
class Placement:
    """The devices of trainer and server. The default is that of a CPU machine for which nothing was planned."""

    mode: str = "separate"
    table: str = ""
    on_gpu: bool = False
    trainer_devices: str | None = None
    """CUDA_VISIBLE_DEVICES of the trainer; None: unchanged."""
    server_devices: str | None = None
    gpu_memory_utilization: float | None = None
    sync: str | None = None
    """Replaces sync.backend=auto; None: unchanged."""
    trainer_bytes: int = 0
    """Bytes that must be free on the trainer's GPU once the server is ready."""
    refused: tuple[str, str, str] | None = None
    """Field, problem and fix of a recipe that cannot be placed."""
    warning: str | None = None
    """The reason why it may not fit, if it is tried anyway."""

    def for_trainer(self, recipe: Recipe) -> Recipe:
        if recipe.placement.mode == "auto" and self.mode != "separate":
            recipe = updated(recipe, "placement", mode=self.mode)
        if self.sync is not None:
            recipe = updated(recipe, "sync", backend=self.sync)
        return recipe

    def server_command(
        self, recipe: Recipe, adapters: Mapping[str, Path] | None = None, weight_transfer: str | None = None
    ) -> list[str]:
        """Return the command that serves the model of `recipe` here; further arguments: see serving.server_command."""
        if self.gpu_memory_utilization is not None:
            share = {"gpu_memory_utilization": self.gpu_memory_utilization}
            recipe = updated(recipe, "server", options=recipe.server.vllm.model_copy(update=share))
        return server_command(recipe, adapters, weight_transfer, self.mode == "time_share")

    def refusal(self, recipe: Recipe) -> SettingError | None:
        if self.refused is not None:
            return SettingError(*self.refused, source=recipe.name)
        if recipe.server.engine != "vllm" or recipe.server.url is not None or self.on_gpu:
            return None
        if self.mode == "time_share":
            fix = "use server.engine=embedded, or placement.mode=separate"
            return SettingError("placement.mode", "'time_share': vLLM sleeps on GPUs only", fix, source=recipe.name)
        if (backend := backend_of(recipe)).devices == "one":
            problem = f"got {backend.name!r}: vLLM has it on GPUs only"
            return SettingError("sync.backend", problem, "use auto or file", source=recipe.name)
        return None

    def describe(self) -> list[str]:
        return [*filter(None, [self.table]), *([f"warning: {self.warning}"] if self.warning else [])]

    def weight_transfer(self, recipe: Recipe) -> str | None:
        """Return the sync backend for full weights; None if the server gets none."""
        if recipe.model.lora is not None:
            return None
        return self.sync or backend_of(recipe).transfer

    def environment(self, process: Literal["trainer", "server"]) -> dict[str, str]:
        devices = self.trainer_devices if process == "trainer" else self.server_devices
        return {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}

    def check_trainers_room(self) -> None:
        """Raise PlacementError unless the trainer's GPU still has the planned memory."""
        if not self.trainer_bytes:
            return
        free = _ask("agentfactory.placement.machine", "", self.environment("trainer"))["gpus"][0]["free"]
        if free < self.trainer_bytes:
            problem = f"the memory table gives the trainer {self.trainer_bytes / 2**30:.2f} GiB of the GPU, but beside "
            problem += f"the server only {free / 2**30:.2f} GiB are free; fix: end other processes on it, lower "
            raise PlacementError(f"{problem}server.options.gpu_memory_utilization, or set placement.mode=time_share")


def place(recipes: Sequence[Recipe], purpose: Literal["train", "serve"], machines: int = 1) -> list[Placement | None]:
    """Place the processes of each recipe, whether it fits or is refused; None if its model does not exist. Later stages
    are planned with the first stage's model; `machines` like this one share the trainer. Raises PlacementError."""
    found: list[Placement | None] = [Placement()] * len(recipes)
    asked: dict[int, Recipe] = {}
    for index, recipe in enumerate(recipes):
        wanted = recipe.placement
        if wanted.mode == "auto" and wanted.gpu_memory_gib is None and not may_have_gpu():
            continue
        if (planned := _with_model(recipe, recipes[0].model.path)) is None:
            found[index] = None
        else:
            asked[index] = planned
    if asked:
        data = [json.loads(recipe.model_dump_json()) for recipe in asked.values()]
        said = json.dumps({"purpose": purpose, "machines": machines, "recipes": data})
        answers = _ask("agentfactory.placement", said)
        for index, answer in zip(asked, answers, strict=True):
            refused = answer.pop("refused", None)
            found[index] = Placement(**answer, refused=refused and tuple(refused))
    return found


def _with_model(recipe: Recipe, first: str) -> Recipe | None:
    teacher = recipe.teacher.model if recipe.teacher is not None else None
    if teacher is not None and not _is_there(teacher):
        return None
    if _is_there(recipe.model.path):
        return recipe
    return recipe.with_model(first) if _is_there(first) else None


def _is_there(model: str) -> bool:
    # a path that is not absolute is a hub name
    return not os.path.isabs(model) or Path(model).exists()


def _ask(module: str, said: str, env: dict[str, str] | None = None) -> Any:
    try:
        return parent_watch.answer_of(module, said, env)
    except RuntimeError as error:
        raise PlacementError(f"the placement could not be planned: {error}") from None

"""One function of recipes on several ranks: `on_ranks` in the test runs this module in each rank.

Arguments: MODULE:FUNCTION, recipes as a JSON list, a folder for each rank's results, further arguments."""

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.processes.accelerator import make_accelerator
from tests.forked import start_ranks


def on_ranks(
    function: Callable[..., Any],
    recipes: Sequence[TrainRecipe],
    folder: Path,
    strategy: str,
    *arguments: Path,
    count: int = 2,
    machines: int = 1,
) -> list[list[Any]]:
    """Return the results of `function(recipe, accelerator, *arguments)` by rank and recipe."""
    told = json.dumps([recipe.model_dump(mode="json", by_alias=True) for recipe in recipes])
    words = (f"{function.__module__}:{function.__name__}", told, str(folder), *map(str, arguments))
    log = folder / "ranks.log"
    ranks = start_ranks("tests.trainers.ranks", *words, log=log, strategy=strategy, count=count, machines=machines)
    assert [rank.wait() for rank in ranks] == [0] * count, log.read_text()
    return [torch.load(folder / f"rank-{number}.pt", weights_only=False) for number in range(count)]


def forget(accelerator: Accelerator) -> None:
    """Let go of what `accelerator` has prepared: the next network's layers may have another class."""
    accelerator.free_memory()
    if accelerator.is_fsdp2:
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = None
        accelerator.state.fsdp_plugin.auto_wrap_policy = transformer_auto_wrap_policy


def whole(value: Tensor | None) -> Tensor | None:
    return value.full_tensor() if isinstance(value, DTensor) else None if value is None else value.clone()


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    recipes = [TrainRecipe.model_validate(recipe) for recipe in json.loads(sys.argv[2])]
    accelerator = make_accelerator(recipes[0])
    found = []
    for recipe in recipes:
        found.append(function(recipe, accelerator, *map(Path, sys.argv[4:])))
        forget(accelerator)
    torch.save(found, Path(sys.argv[3]) / f"rank-{accelerator.process_index}.pt")
    accelerator.end_training()

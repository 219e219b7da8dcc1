"""Operators that an update dispatches per micro-batch, at 24 layers: `python benchmarks/dispatches.py [--quick]`.

On a GPU the launch of a kernel takes about 18 us of the host's time, so an update of a small network is as long as its
launches. The counts are exact on a CPU: those of a random Qwen2 of one and of three layers, 16 rows of 96 tokens in one
micro-batch, in bfloat16; the difference gives a layer's. The first update, which creates the optimiser's state, is not
counted. Only the CPU's own path is counted, not FlexAttention's.

The last line is JSON: per case `dispatches`, and those of them that compute (`kernels`); the others are views.
"""

import json
import random
import sys
import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentfactory.trainers.batches.batch import TrainingRow
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_policy

LAYERS, ROWS, LENGTH, VOCABULARY = 24, 16, 96, 512
CASES: dict[str, dict[str, Any]] = {
    "packed, checkpointed": {"gradient_checkpointing": True, "batching": "packed"},
    "packed, checkpointed, adapter": {"gradient_checkpointing": True, "batching": "packed", "lora": {"rank": 16}},
    "tree, checkpointed": {"gradient_checkpointing": True, "batching": "tree"},
    "packed": {"batching": "packed"},
}
"""Case -> settings of `train`, and model.lora."""


class Count(TorchDispatchMode):
    """Counts operators; an operator whose result shares its argument's memory is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.views = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        made = any(part in name for part in ("empty", "detach", "alias", "lift_fresh"))
        shares = any(
            returned.alias_info is not None and not returned.alias_info.is_write
            for returned in function._schema.returns
        )
        if made or shares or name.endswith("_unsafe_view"):
            self.views += 1
        else:
            self.kernels += 1
        return function(*args, **(kwargs or {}))


def count(layers: int, train: dict[str, Any]) -> tuple[int, int]:
    """Return the kernels and the views of an update."""
    settings = dict(train)
    lora = settings.pop("lora", None)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        sizes = {"hidden_size": 56, "intermediate_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2}
        shape = Qwen2Config(vocab_size=VOCABULARY, num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
        Qwen2ForCausalLM(shape).save_pretrained(folder)
        model = {"path": folder, "dtype": "bfloat16", "lora": lora}
        train = {"steps": 2, "token_budget": ROWS * LENGTH, **settings}
        recipe = TrainRecipe.model_validate({"model": model, "train": train})
        learner = Learner(recipe, Accelerator(cpu=True))
        batch = learner.deal(rows(2 * LENGTH // 3 if settings["batching"] == "tree" else 0))
        assert len(batch.micro_batches) == 1
        update_policy(learner, batch, recipe)
        with Count() as counted:
            update_policy(learner, batch, recipe)
    return counted.kernels, counted.views


def rows(shared: int) -> list[TrainingRow]:
    """Return rows whose last third is trained, and whose first `shared` tokens are the same."""
    draw = random.Random(0)
    prefix = [draw.randrange(VOCABULARY) for _ in range(shared)]
    found = []
    for _ in range(ROWS):
        targets = list(range(2 * LENGTH // 3, LENGTH))
        ids = prefix + [draw.randrange(VOCABULARY) for _ in range(LENGTH - shared)]
        streams = {
            name: [value] * len(targets) for name, value in (("behaviour", 1.0), ("weight", 1.0), ("mixed", 0.0))
        }
        found.append(TrainingRow(ids, targets, streams | {"advantage": [draw.gauss(0, 1)] * len(targets)}))
    return found


def main() -> None:
    found = {}
    for name, settings in [*CASES.items()][: 2 if "--quick" in sys.argv[1:] else None]:
        one, three = count(1, settings), count(3, settings)
        kernels, views = (a + (LAYERS - 1) * (b - a) // 2 for a, b in zip(one, three, strict=True))
        found[name] = {"dispatches": kernels + views, "kernels": kernels}
        print(f"{name:32}{kernels + views:8,} dispatches, {kernels:7,} of them kernels", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

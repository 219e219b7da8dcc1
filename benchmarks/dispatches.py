"""Operators that an update dispatches per micro-batch, at 24 layers, and bytes that its head moves:
`python benchmarks/dispatches.py`.

On a GPU the launch of a kernel takes about 18 us of the host's time, so an update of a small network is as long as its
launches. The counts are exact on a CPU: those of a random Qwen2 of one and of three layers, 16 rows of 96 tokens in one
micro-batch, in bfloat16; the difference gives a layer's. The first update, which creates the optimiser's state, is not
counted. The cases "cuda" have the trainer's choices for a GPU. Only there torch has FlexAttention's backward pass, and
products of another precision than their factors: an operator that is one call in each pass stands for each.

The head's bytes are those of all operators but matrix products, inputs and results, per scored token and entry of the
vocabulary, in bfloat16.

The last line is JSON: per case `dispatches`, and those of them that compute (`kernels`); the others are views; and
`head_bytes`, with all weights trained and with a frozen head.
"""

import json
import random
import tempfile
from itertools import product
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentfactory.trainers.batches.batch import TrainingRow
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks import attention, head, layers, network
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_policy

LAYERS, ROWS, LENGTH, VOCABULARY = 24, 16, 96, 512
CASES: dict[str, dict[str, Any]] = {
    "cuda: packed": {"batching": "packed"},
    "cuda: packed, adapter": {"batching": "packed", "lora": {"rank": 16}},
    "cuda: tree": {"batching": "tree"},
    "packed, checkpointed": {"gradient_checkpointing": True, "batching": "packed"},
    "packed, checkpointed, adapter": {"gradient_checkpointing": True, "batching": "packed", "lora": {"rank": 16}},
    "tree, checkpointed": {"gradient_checkpointing": True, "batching": "tree"},
    "packed": {"batching": "packed"},
}
"""Case -> settings of `train`, and model.lora."""


@torch.library.custom_op("benchmark::attention", mutates_args=())
def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Stand for FlexAttention."""
    return query.transpose(1, 2).clone()


@torch.library.custom_op("benchmark::attention_backward", mutates_args=())
def attend_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for tensor in (query, key, value)]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


@torch.library.custom_op("benchmark::product", mutates_args=())
def product_in(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stand for a product that a GPU returns in another precision."""
    return (one @ other).to(dtype)


attend.register_autograd(lambda ctx, grad: tuple(attend_backward(grad, *ctx.saved_tensors)), setup_context=_keep)


def as_on_a_gpu() -> None:
    """Make networks choose as on a GPU."""
    choose = network._attention_of
    network._need_gpu = lambda *named: None
    network.is_installed = lambda package: True
    network._attention_of = lambda model, train, device, *rest: choose(model, train, torch.device("cuda"), *rest)
    layers._gradient = lambda grad, rows, dtype: product_in(grad.T, rows, dtype)
    attention.flex_attention_forward = lambda module, query, key, value, mask, **_: (attend(query, key, value), None)


NOT_COUNTED = ("mm", "addmm", "gather", "index_put_")
"""Operators whose bytes are not counted: products, and those that touch one entry per token."""


class Count(TorchDispatchMode):
    """Counts operators; an operator whose result shares its argument's memory is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.views = self.bytes = 0

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
        result = function(*args, **(kwargs or {}))
        if name.split("::")[1] not in NOT_COUNTED and not shares and not made:
            # `out` is written, not read
            read = args, {key: value for key, value in (kwargs or {}).items() if key != "out"}
            held = [value for value in tree_leaves((read, result)) if isinstance(value, torch.Tensor)]
            self.bytes += sum(tensor.numel() * tensor.itemsize for tensor in held)
        return result


def head_bytes(frozen: bool) -> float:
    """Return a GPU's bytes per token and entry: what grows neither with the tokens nor with the vocabulary alone."""
    head._in_one = lambda one, other: True
    total = 0
    for tokens, vocabulary in product((512, 1024), (4096, 8192)):
        weight = torch.randn(vocabulary, 8, dtype=torch.bfloat16 if frozen else torch.float32, requires_grad=not frozen)
        hidden = torch.randn(tokens, 8, dtype=torch.bfloat16, requires_grad=True)
        with Count() as counted:
            scores = head.Scores.apply(hidden, weight, torch.arange(tokens), 1.0, lambda logits: logits, tokens)
            scores[0].sum().backward()
        total += counted.bytes if (tokens, vocabulary) in ((512, 4096), (1024, 8192)) else -counted.bytes
    return total / 512 / 4096


def count(layers: int, train: dict[str, Any]) -> tuple[int, int]:
    """Return the kernels and the views of an update."""
    settings = dict(train)
    lora = settings.pop("lora", None)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        sizes = {"hidden_size": 224, "intermediate_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2}
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
    found: dict[str, Any] = {"head_bytes": {"trained": head_bytes(False), "frozen": head_bytes(True)}}
    print(found)
    for name, settings in sorted(CASES.items(), key=lambda case: case[0].startswith("cuda")):
        if name.startswith("cuda"):
            as_on_a_gpu()
        one, three = count(1, settings), count(3, settings)
        kernels, views = (a + (LAYERS - 1) * (b - a) // 2 for a, b in zip(one, three, strict=True))
        found[name] = {"dispatches": kernels + views, "kernels": kernels}
        print(f"{name:32}{kernels + views:8,} dispatches, {kernels:7,} of them kernels", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

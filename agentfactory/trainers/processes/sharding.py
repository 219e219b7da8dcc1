"""Send rank 0's decisions to the other ranks and, under fsdp2, their shards of the weights, which only rank 0 loads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoConfig, PreTrainedModel

from agentfactory.base.errors import SettingError

Decision = TypeVar("Decision")
Value = TypeVar("Value")


def load_on_rank_0(load: Callable[[], PreTrainedModel], kind: Any, path: str, dtype: torch.dtype) -> Any:
    """Return the network that `load` loads from `path`, by transformers' class `kind`; on all ranks except 0, the same
    network on the CPU with arbitrary weights and buffers, which take up memory only once they are written. Every
    process calls it."""
    if dist.get_rank() == 0:
        network: Any = load()
    else:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            network = kind.from_config(config, dtype=dtype, trust_remote_code=False)
        # new memory for each name, so tied weights are no longer tied
        network.to_empty(device="cpu")
    # weights that the checkpoint stores under both names with different values are not tied, whatever its config says
    network.all_tied_weights_keys = decided_by_rank_0(lambda: dict(network.all_tied_weights_keys))
    network.tie_weights(recompute_mapping=False)
    return network


def decided_by_rank_0(decide: Callable[[], Decision]) -> Decision:
    """Return, in all ranks, the result of `decide` on rank 0, or raise its SettingError. Every process calls it."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = decide()
        except SettingError as error:
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    return found[0]


@contextmanager
def weights_of_rank_0(model: nn.Module) -> Iterator[None]:
    """Fill `model`, which is sharded in place in this context, with rank 0's weights. Every process calls it."""
    weights = model.state_dict() if dist.get_rank() == 0 else {}
    own = {name for name, _ in model.named_parameters()}
    # torch shards a module with two names, such as the trained rows of tied tables, under the first one only
    for alias in {name for name, _ in model.named_parameters(remove_duplicate=False)} - own:
        weights.pop(alias, None)
    yield
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    missing = own & {*set_model_state_dict(model, weights, options=options).missing_keys}
    if missing:
        raise RuntimeError(f"rank 0 has no weights for {', '.join(sorted(missing))}")
    for buffer in model.buffers():
        # buffers outside the state dictionary, such as the frequencies of rotary embeddings
        dist.broadcast(buffer, src=0)


def of_rank_0(accelerator: Accelerator, value: Value) -> Value:
    """Return rank 0's `value` in all ranks; every process calls it."""
    found = [value]
    if accelerator.num_processes > 1:
        dist.broadcast_object_list(found, src=0)
    return found[0]

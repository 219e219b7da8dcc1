"""The network under a policy, a critic or a reference, which computes hidden states under every attention
implementation."""

from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentfactory.trainers.adapters import has_adapter
from agentfactory.trainers.attention import BY_BLOCKS, attention_arguments, use_ours, whole_blocks
from agentfactory.trainers.network import decoder_layers

if TYPE_CHECKING:
    from peft import PeftModel


class Backbone(nn.Module):
    """A transformers network whose hidden states subclasses use in `forward`."""

    def __init__(self, model: "PreTrainedModel | PeftModel", dtype: torch.dtype) -> None:
        """`dtype` is the precision of the forward pass; below float32 it runs under autocast."""
        super().__init__()
        self.model = model
        self.dtype = dtype
        use_ours(self.network)

    @property
    def network(self) -> Any:
        """The transformers model, with adapter layers in place if there is an adapter."""
        return self.model.get_base_model() if has_adapter(self.model) else self.model

    @property
    def is_lora(self) -> bool:
        """Whether an adapter is trained instead of the network's own weights."""
        return has_adapter(self.model)

    @property
    def _no_split_modules(self) -> list[str]:
        # accelerate makes each module of these classes a unit of FSDP2
        return sorted({type(layer).__name__ for layer in decoder_layers(self.network)})

    def train(self, mode: bool = True) -> Self:
        """Switches only the adapter's dropout: a network's own dropout would make the trainer's log-probabilities
        differ from the server's."""
        super().train(False)
        self.training = mode
        for name, module in self.named_modules():
            if "lora_dropout" in name:
                module.train(mode)
        return self

    def hidden(
        self,
        ids: Int[Tensor, "batch length"],
        positions: Int[Tensor, "1 length"] | None = None,
        ends: Int[Tensor, "1 length"] | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """Returns the network's hidden state of each token, before any head.

        `positions` and `ends` say which tokens see each other in a line of several rows or a tree, as in MicroBatch.
        Without them lines count from 0 and attend causally, which is exact for rows padded on the right.
        """
        arguments: dict[str, Any] = {}
        length, kind = ids.shape[1], self.network.config._attn_implementation
        if kind == BY_BLOCKS:
            ids, positions, ends = whole_blocks(ids, positions, ends)
        if positions is not None and ends is not None:
            arguments = attention_arguments(kind, positions, ends, self.dtype)
        # each weight is used once, so autocast copies in self.dtype would only take up memory until the pass ends,
        # which gradient checkpointing and fsdp2 are meant to avoid
        lower = self.dtype.itemsize < 4
        with torch.autocast(ids.device.type, dtype=self.dtype, enabled=lower, cache_enabled=False):
            found = self.network.base_model(input_ids=ids, position_ids=positions, use_cache=False, **arguments)
        return found.last_hidden_state[:, :length]

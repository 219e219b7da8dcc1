"""The network under a policy, a critic or a reference: its hidden states, under every attention implementation."""

from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

from trainers.network import decoder_layers


class Backbone(nn.Module):
    """A transformers network whose hidden states its subclasses make something of, in `forward`."""

    def __init__(self, model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> None:
        """`dtype` is the precision of the forward pass; below float32 it runs under autocast."""
        super().__init__()
        self.model = model
        self.dtype = dtype

    @property
    def network(self) -> Any:
        """The transformers model, with adapter layers in place if there is an adapter."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def is_lora(self) -> bool:
        """Whether an adapter is trained in place of the network's own weights."""
        return isinstance(self.model, PeftModel)

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
        positions: Int[Tensor, "batch length"] | None = None,
        mask: Bool[Tensor, "batch 1 length length"] | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """What the network makes of each token, before any head.

        Without `positions` and `mask` lines count from 0 and attend causally, which is exact for rows padded on the
        right. In a `mask` every token sees itself at least.
        """
        kind = self.network.config._attn_implementation
        attention: Tensor | BlockMask | None = None
        shape = ids.shape
        if mask is not None and kind.startswith("flash_attention"):
            # it takes no mask, but finds the sequences of a single line by their positions
            assert positions is not None
            ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
        elif mask is not None:
            attention = _attention_mask(mask, kind, self.dtype)
        with torch.autocast(ids.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            hidden = self.network.base_model(
                input_ids=ids, position_ids=positions, attention_mask=attention, use_cache=False
            ).last_hidden_state
        return hidden.reshape(*shape, -1)


def _attention_mask(mask: Bool[Tensor, "batch 1 length length"], kind: str, dtype: torch.dtype) -> Tensor | BlockMask:
    """The mask in the form that the attention implementation takes."""
    if kind == "flex_attention":
        batch, _, length, _ = mask.shape

        def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return mask[row, 0, query, key]

        return create_block_mask(visible, batch, None, length, length, device=mask.device)
    # sdpa would make its own of a boolean mask in every layer, and keep it for the backward pass; eager adds it
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))

"""The network of a policy, a critic or a reference: it computes hidden states with every attention implementation."""

from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentfactory.rollout.images.features import Features, compute_features, encoder_outputs
from agentfactory.trainers.batches.image_batches import Images
from agentfactory.trainers.networks.attention import BY_BLOCKS, attention_arguments, use_ours, whole_blocks
from agentfactory.trainers.networks.lora import has_adapter
from agentfactory.trainers.networks.network import body_of, decoder_layers
from agentfactory.trainers.networks.vision_tower import is_rotary, tower_is_trained

if TYPE_CHECKING:
    from peft import PeftModel


class Backbone(nn.Module):
    """A transformers network; subclasses use its hidden states in `forward`."""

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
        """True if an adapter is trained instead of the network's own weights."""
        return has_adapter(self.model)

    @property
    def _no_split_modules(self) -> list[str]:
        # accelerate makes each module of these classes a unit of FSDP2
        return sorted({type(layer).__name__ for layer in decoder_layers(self.network)})

    def train(self, mode: bool = True) -> Self:
        """Switch only the adapter's dropout: a network's own dropout would make the trainer's log-probabilities differ
        from the server's."""
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
        images: Images | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """Return the network's hidden state of each token, before any head.

        `positions` and `ends` define which tokens attend to each other in a line of several rows or a tree, as in
        MicroBatch. Without them lines count from 0 and attend causally, which is exact for rows padded on the right.
        `images` are the images in the lines.
        """
        arguments: dict[str, Any] = {}
        length, kind = ids.shape[1], self.network.config._attn_implementation
        if kind == BY_BLOCKS:
            ids, positions, ends = whole_blocks(ids, positions, ends)
        if positions is not None and ends is not None:
            arguments = attention_arguments(kind, positions, ends, self.dtype)
        places = positions
        if is_rotary(self.network.config):
            places = _rotary(positions, images.rotary if images is not None else None)
        # each weight is used once, so autocast copies in self.dtype would only take up memory until the pass ends,
        # which gradient checkpointing and fsdp2 are meant to avoid
        lower = self.dtype.itemsize < 4
        with torch.autocast(ids.device.type, dtype=self.dtype, enabled=lower, cache_enabled=False):
            features = self._features(images) if images is not None else []
            if images is not None and images.places:
                arguments |= encoder_outputs(self.network, [features[number] for number in images.places])
            found = body_of(self.network)(input_ids=ids, position_ids=places, use_cache=False, **arguments)
        hidden = found.last_hidden_state[:, :length]
        if images is not None and not images.places:
            # every weight of the tower contributes to the result, so processes stay in step in the backward pass, too
            hidden = hidden + 0.0 * sum(part.sum() for image in features for part in (image.tokens, *image.deep))
        return hidden

    def _features(self, images: Images) -> list[Features]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and tower_is_trained(self.network)):
            return compute_features(self.network, images.inputs, images.counts)


def _rotary(
    positions: Int[Tensor, "1 length"] | None, rotary: Int[Tensor, "3 batch shorter"] | None
) -> Int[Tensor, "streams batch length"] | None:
    """Return the position ids of a multimodal network: in time, height and width. If rows share a line, the positions
    in the rows come first, from which FlashAttention separates rows. None if lines count from 0."""
    if rotary is None:
        return None if positions is None else positions.expand(4, *positions.shape)
    if positions is None:
        return rotary
    # lines of whole blocks end with tokens that no other token attends to
    rotary = nn.functional.pad(rotary, (0, positions.shape[-1] - rotary.shape[-1]))
    return torch.cat([positions.expand(1, *rotary.shape[1:]), rotary])

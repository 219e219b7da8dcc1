"""The network of a policy, a critic or a reference, and which row layouts are exact for it: padded, packed or tree."""

import inspect
import logging
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentfactory.base.errors import SettingError
from agentfactory.rollout.images.features import Features, compute_features, encoder_outputs
from agentfactory.rollout.inference.sequence_lengths import LONGEST, position_limit, proof_length
from agentfactory.trainers.batches.batch import Batching
from agentfactory.trainers.batches.image_batches import Images
from agentfactory.trainers.batches.packing import grow
from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.networks import attention
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
        attention.use_ours(self.network)

    @property
    def network(self) -> Any:
        """The transformers model, with adapter layers in place if there is an adapter."""
        return self.model.get_base_model() if has_adapter(self.model) else self.model

    @property
    def is_lora(self) -> bool:
        return has_adapter(self.model)

    @property
    def _no_split_modules(self) -> list[str]:
        # accelerate makes each module of these classes a unit of FSDP2
        return sorted({type(layer).__name__ for layer in decoder_layers(self.network)})

    def train(self, mode: bool = True) -> Self:
        """Switch only the adapter's dropout: another one would make log-probabilities differ from the server's."""
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
        MicroBatch. Without them lines count from 0 and attend causally. `images` are the images in the lines."""
        arguments: dict[str, Any] = {}
        length, kind = ids.shape[1], self.network.config._attn_implementation
        if kind == attention.BY_BLOCKS:
            ids, positions, ends = attention.whole_blocks(ids, positions, ends)
        if positions is not None and ends is not None:
            arguments = attention.attention_arguments(kind, positions, ends, self.dtype)
        places = positions
        if is_rotary(self.network.config):
            places = _rotary(positions, images.rotary if images is not None else None)
        # each weight is used once, so autocast copies in self.dtype would only take up memory until the pass ends,
        # which gradient checkpointing and fsdp2 are meant to avoid
        with torch.autocast(ids.device.type, self.dtype, enabled=self.dtype.itemsize < 4, cache_enabled=False):
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
    """Return position ids in time, height and width, or None if lines count from 0. If rows share a line, the positions
    in the rows come first, from which FlashAttention separates rows."""
    if rotary is None:
        return None if positions is None else positions.expand(4, *positions.shape)
    if positions is None:
        return rotary
    # lines of whole blocks end with tokens that no other token attends to
    rotary = nn.functional.pad(rotary, (0, positions.shape[-1] - rotary.shape[-1]))
    return torch.cat([positions.expand(1, *rotary.shape[1:]), rotary])


logger = logging.getLogger(__name__)


def resolve_batching(network: PreTrainedModel, train: TrainConfig, measure: bool = True) -> Batching:
    """Return `train.batching`; for "auto", tree if it is exact for this network, else padded.

    Call it while the network has transformers' choice of attention: `train.attention` may run only on a GPU. Without
    `measure` no weight is read. Raises SettingError if the requested layout would change the network's results."""
    if train.batching == "padded":
        return "padded"
    asked: Batching = "tree" if train.batching == "auto" else train.batching
    reason = _why_inexact(network, asked, train.attention, measure)
    if train.batching != "auto" and reason is not None:
        raise SettingError("train.batching", f"{asked} would be wrong: {reason}", "use padded, or auto")
    logger.info("train.batching: %s", asked if reason is None else f"padded, because {reason}")
    return asked if reason is None else "padded"


def _why_inexact(network: PreTrainedModel, batching: Batching, asked: str, measure: bool) -> str | None:
    config: Any = network.config.get_text_config()
    name = type(network).__name__
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # networks older than layer_types
        kinds = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]
    others = sorted(set(kinds) - {"full_attention"})
    if others:
        return f"{name} has layers of {', '.join(others)}; only full_attention is exact"
    if attention.selects_keys(network):
        return f"{name} selects keys per query"
    takes = inspect.signature(body_of(network).forward).parameters
    if "position_ids" not in takes or getattr(config, "alibi", False):
        return f"{name} does not accept position_ids"
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in takes.values()):
        return f"{name} passes no arguments to its attention"
    attention.use_ours(network)
    kind = network.config._attn_implementation if asked in ("auto", "sdpa") else asked
    packs = batching == "packed" and kind.startswith("flash_attention")
    if kind not in (attention.BY_RUNS, "flex_attention") and not packs:
        if asked in ("auto", "sdpa"):
            return f"{name} does not use transformers' attention interface"
        return f"train.attention={kind} does not support {batching} rows; use sdpa or flex_attention"
    if not measure:
        return None
    # a network's own declaration is not enough: some accept the arguments and do not use them
    try:
        error = _error(network, batching)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as fault:  # each network has its own
        return f"{name} fails on rows that share a line: {type(fault).__name__}: {fault}"
    # NaN is an error, too
    if not error <= (1e-4 if network.dtype == torch.float32 else 0.05):
        return f"{name} gives rows that share a line other results, by {error:.1g} of the largest value"
    return None


@torch.no_grad()
def _error(network: PreTrainedModel, batching: Batching) -> float:
    """Return the largest deviation of a line's hidden states from those of the rows alone, relative to the largest."""
    network.eval()
    backbone, rows = Backbone(network, network.dtype), proof_rows(network)
    alone = torch.cat([backbone.hidden(row[None])[0] for row in rows])
    numbered = list(enumerate(row.numpy(force=True) for row in rows))
    parts, paths, start = [], [], 0
    for tree in [grow(numbered)] if batching == "tree" else [grow([row]) for row in numbered]:
        parts.append((tree.ids, tree.positions, tree.ends + start))
        paths += [tree.paths[number] + start for number in sorted(tree.paths)]
        start += len(tree.ids)
    line, positions, ends = torch.from_numpy(np.hstack(parts)[:, None]).to(alone.device)
    shared = backbone.hidden(line, positions, ends)[0, torch.from_numpy(np.concatenate(paths)).to(alone.device)]
    return float((shared - alone).abs().max() / alone.abs().max())


def proof_rows(network: PreTrainedModel) -> list[Tensor]:
    """Return rows with common prefixes, in lexicographic order. The longest exceeds the lengths at which the network
    computes differently, as far as a proof at the start can."""
    config = network.config.get_text_config()
    fields = config.to_dict()
    limit, reach = position_limit(fields), getattr(config, "max_position_embeddings", None)
    # XLNet's is -1
    longest = min(2 * LONGEST if limit is None else limit.length, reach if reach and reach > 0 else 2 * LONGEST)
    tokens = torch.arange(min(proof_length(fields, longest) + 16, longest), device=network.device)
    # few and small ids: others may stand for images
    tokens = (tokens + tokens // 9) % 9 + 1
    rows = [tokens, torch.cat([tokens[:3], tokens[5:10]]), torch.cat([tokens[:5], tokens[9:15]])]
    rows = [row % config.vocab_size for row in rows]
    return sorted(rows, key=lambda row: row.tolist())

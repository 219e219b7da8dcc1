"""Several unmerged LoRA adapters on one model. Each applies to its own tokens of the flattened batch."""

import itertools
import json
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentfactory.rollout.inference.adapter_config import ADAPTER, WEIGHTS, unsupported
from agentfactory.rollout.inference.http_server import BadRequest

_PREFIX = "base_model.model."
_serial = itertools.count(1)

Factors = dict[str, tuple[Tensor, Tensor]]
"""Per module: A [in, rank] and B [rank, out], with B already scaled by alpha / rank."""


class Adapter:
    """A loaded adapter; `serial` distinguishes adapters loaded under the same name."""

    def __init__(self, name: str, path: str, factors: Factors) -> None:
        self.name, self.path, self.factors = name, path, factors
        self.serial = next(_serial)


class Segment(NamedTuple):
    """The tokens `begin` to `end` of a step, which use an adapter except where `others` [tokens, 1] is true."""

    factors: Factors
    begin: int
    end: int
    others: Tensor | None = None


class AdapterLayers:
    """Forward hooks that add the adapters' products to the outputs of the model's linear modules. `segments`, and for
    the head `sampled_segments`, must be set before each step; tokens outside them use the base model alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.segments: list[Segment] = []
        self.sampled_segments: list[Segment] = []
        """The segments of the head's input, which has only the tokens after which one is sampled."""
        # Memory of factors, and the adapter that uses it. A new adapter reuses the memory of a deleted one, so CUDA
        # graphs that read it stay valid from one adapter version to the next.
        self._places: list[tuple[Factors, weakref.ref[Adapter]]] = []
        # no vision tower, whose features would depend on the adapter
        layers: set[nn.Module] = {module for module in model.get_decoder().modules() if isinstance(module, nn.Linear)}
        self._head, self._embedding = model.get_output_embeddings(), model.get_input_embeddings()
        # a vision-language model's images are embedded before the segments are known
        tables = {self._head, self._embedding} if not hasattr(model.config, "vision_config") else set()
        self._modules = {name: module for name, module in model.named_modules() if module in layers | tables}
        self._hooked: set[str] = set()
        self._device = model.device  # not the device of the weights, which may sleep on the CPU

    def load(self, name: str, path: str) -> Adapter:
        """Load a peft folder (adapter_config.json, adapter_model.safetensors). Raises BadRequest."""
        folder = Path(path)
        try:
            config: dict[str, Any] = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
            tensors = load_file(folder / WEIGHTS)
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            raise BadRequest(f"{path} is not a readable adapter folder: {error}") from error
        if (reason := unsupported(config)) is not None:
            raise BadRequest(reason)
        modules: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            module, _, factor = key.removeprefix(_PREFIX).rpartition(".lora_")
            is_table = module in self._modules and self._modules[module] is self._embedding
            expected = ("embedding_A", "embedding_B") if is_table else ("A.weight", "B.weight")
            if module not in self._modules or factor not in expected:
                raise BadRequest(
                    f"tensor {key}: adapters are supported on linear modules of the language model's layers, and on "
                    "head and embedding of text models"
                )
            modules.setdefault(module, {})["A" if "A" in factor else "B"] = tensor
        factors = {}
        for module, pair in modules.items():
            weight = self._modules[module].weight
            assert isinstance(weight, Tensor)
            sizes = weight.shape if self._modules[module] is self._embedding else weight.shape[::-1]
            rank = _by_pattern(config, "rank_pattern", module, config["r"])
            scale = _by_pattern(config, "alpha_pattern", module, config["lora_alpha"]) / (
                rank**0.5 if config.get("use_rslora") else rank
            )
            want = {"A": (rank, sizes[0]), "B": (sizes[1], rank)}
            got = {factor: tuple(tensor.shape) for factor, tensor in pair.items()}
            if got != want:
                raise BadRequest(f"{module}: the adapter's factors have shapes {got}, the model needs {want}")
            factors[module] = (
                pair["A"].to(self._device, weight.dtype).T.contiguous(),
                (pair["B"].float() * scale).to(self._device, weight.dtype).T.contiguous(),
            )
        if not factors:
            raise BadRequest(f"{path} contains no tensors")
        for module in factors.keys() - self._hooked:
            self._hook(module)
        return self._settle(Adapter(name, path, factors))

    def _settle(self, adapter: Adapter) -> Adapter:
        empty = [(factors, owner) for factors, owner in self._places if owner() is None]
        self._places = [(factors, owner) for factors, owner in self._places if owner() is not None]
        for factors, _ in empty:
            if _places(factors) == _places(adapter.factors):
                for name, pair in adapter.factors.items():
                    for place, factor in zip(factors[name], pair, strict=True):
                        place.copy_(factor)
                adapter.factors = factors
                break
        self._places.append((adapter.factors, weakref.ref(adapter)))
        return adapter

    def tensors(self) -> list[Tensor]:
        return [factor for factors, _ in self._places for pair in factors.values() for factor in pair]

    def _hook(self, name: str) -> None:
        def add_products(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            for factors, begin, end, others in self.sampled_segments if module is self._head else self.segments:
                if pair := factors.get(name):
                    part = args[0][:, begin:end]
                    if module is self._embedding:
                        # scaled as Gemma's embedding scales the table's rows
                        product = nn.functional.embedding(part, pair[0]) @ pair[1] * getattr(module, "embed_scale", 1.0)
                    else:
                        product = (part @ pair[0]) @ pair[1]
                    # fill instead of multiplying: a NaN of one adapter must not reach other adapters' tokens
                    output[:, begin:end] += product if others is None else product.masked_fill_(others, 0)

        self._modules[name].register_forward_hook(add_products)
        self._hooked.add(name)


def _places(factors: Factors) -> dict[str, list[tuple[torch.Size, int]]]:
    return {
        name: [(factor.shape, factor.untyped_storage().nbytes()) for factor in pair] for name, pair in factors.items()
    }


def segments(adapters: Sequence[Adapter | None], after: np.ndarray) -> list[Segment]:
    """Return the segments of requests that are sorted by adapter and whose tokens end at `after`."""
    made, begin = [], 0
    for index, adapter in enumerate(adapters):
        if index + 1 == len(adapters) or adapters[index + 1] is not adapter:
            if adapter:
                made.append(Segment(adapter.factors, begin, int(after[index])))
            begin = int(after[index])
    return made


def _by_pattern(config: dict[str, Any], field: str, module: str, default: Any) -> Any:
    """Return a module's value of rank or alpha: that of the first pattern that fits the end of its name, as in peft."""
    patterns = config.get(field) or {}
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)

"""Linear layers on the CPU: oneDNN's packed weights, up to three times as fast as torch's, and fake quantisation.

From WHOLE elements on, the packed weight replaces the module's own. A smaller weight, and one that other modules share
(a tied head), keeps both. `ServedWeights` reads and writes weights wherever they are."""

from collections import Counter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentfactory.base.processes.devices import onednn_packs
from agentfactory.rollout.inference.embedded.sampling import UnsupportedModel

# oneDNN compiles a kernel per shape (0.4 ms) and keeps 1024 of them, so batches are padded to a multiple of ROWS, and
# smaller ones to a multiple of FEW, to limit the number of shapes. Small weights are packed for ROWS rows or more, from
# MULTIPLICATIONS on; below, the slower call costs more than it saves. Measured on an EPYC (AVX-512) with torch 2.13 and
# one thread, packed compared with torch's: a head of 151936 x 896 takes .28 of the time with 4 rows, .38 with 16, .46
# with 32; 4864 x 896 takes .30 with 4, .5 to .6 with 16, .65 with 32, .85 with 512; with AVX2 and two threads, .37
# with 4, .47 with 16 and 32, .72 with 256. In bfloat16, on an EPYC with these instructions, the head takes .60 of
# torch's time with 8 or 16 rows, 4864 x 896 .50 and .42, .76 with 64, 1 with 512.
ROWS = 32
FEW = 4
MULTIPLICATIONS = 2**20
WHOLE = 2**18
"""Elements from which a packed weight replaces the module's own."""


def use_onednn(model: nn.Module) -> None:
    """Use oneDNN for the model's `nn.Linear` modules on an x86 CPU with instructions for their dtype; elsewhere do
    nothing. Their inputs must be [1, rows, features] or [rows, features], without gradients. Large weights may change
    only by `ServedWeights`."""
    whole = _whole_weights(model)
    for module in (modules := onednn_modules(model)):
        module.forward = _PackedLinear(module, id(module.weight) in whole)  # type: ignore[assignment, method-assign]
    if modules and whole:
        # weights of the file's dtype are mapped from it: as long as one is, the packed ones stay in memory, too
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


def onednn_modules(model: nn.Module, device: str = "cpu") -> list[nn.Linear]:
    """Return the modules for `use_onednn`, with weights on `device`: cpu, or meta before they are allocated."""
    dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if onednn_packs(dtype)]
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.dtype in dtypes and module.weight.device.type == device
    ]


def second_copies(model: Any, sequences: int) -> int:
    """Return the bytes of weights that are kept twice, for a meta model and at most `sequences` rows in its head."""
    whole = _whole_weights(model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return sum(
        linear.weight.nbytes
        for linear in onednn_modules(model, "meta")
        if id(linear.weight) not in whole and (linear is not head or sequences >= FEW)
    )


def _whole_weights(model: nn.Module) -> set[int]:
    """Return the ids of large weights that belong to one module only; their packed form can replace them."""
    users = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
    return {id(weight) for weight, count in users.items() if count == 1 and weight.numel() >= WHOLE}


def drop_packed(model: nn.Module) -> None:
    """Free second copies; each is created again on its next use."""
    for module in model.modules():
        if isinstance(module.forward, _PackedLinear):
            module.forward.drop()


class _PackedLinear:
    """The forward pass of a linear module. With `whole`, the packed weight replaces the module's own."""

    def __init__(self, module: nn.Linear, whole: bool) -> None:
        self._module = module
        self._packed = _pack(module.weight) if whole else None
        self._version = -1
        self.whole = whole
        """True if the packed weight is the only one."""
        if whole:
            # on the meta device, a module that reads its weight in another way fails instead of reading zeros
            module.weight = nn.Parameter(torch.empty_like(module.weight, device="meta"), requires_grad=False)

    def drop(self) -> None:
        if not self.whole:
            self._packed, self._version = None, -1

    def read(self) -> Tensor:
        """Return a copy of the packed weight in the module's layout."""
        assert self._packed is not None
        return self._packed.to_dense()

    def write(self, value: Tensor) -> None:
        """Replace the packed weight. `value` is converted to its dtype."""
        self._packed = None  # freed first
        self._packed = _pack(value.to(self._module.weight.dtype))

    def __call__(self, x: Tensor) -> Tensor:
        rows, weight = x.shape[-2], self._module.weight
        if self.whole:
            step = FEW if rows < ROWS else ROWS
        else:
            large = weight.numel() >= WHOLE  # a head with the embedding's weight
            if rows < (FEW if large else ROWS) or rows * weight.numel() < MULTIPLICATIONS:
                return F.linear(x, weight, self._module.bias)
            # torch counts in-place changes of a tensor, which shows that a weight update requires a new packed copy
            if self._version != weight._version:
                self._packed = _pack(weight)
                self._version = weight._version
            step = FEW if large and rows < ROWS else ROWS
        padding = -rows % step
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._module.bias, "none", [], "")
        return y[..., :rows, :] if padding else y


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return packed


class ServedWeights:
    """The weights of a served model by the names of its `state_dict`, packed or not."""

    def __init__(self, model: nn.Module) -> None:
        self.state = model.state_dict()
        """Name -> tensor, with the weight's shape and dtype, but without its values if they are packed."""
        self._packed = {
            f"{name}.weight": packed
            for name, module in model.named_modules()
            if isinstance(packed := module.forward, (_PackedLinear, Int8Linear)) and packed.whole
        }
        names: dict[object, list[str]] = {}
        for name, tensor in self.state.items():
            names.setdefault(name if name in self._packed else tensor.data_ptr(), []).append(name)
        self.tied = list(names.values())
        """Groups of names, one group per tensor; most groups have one name."""

    def read(self, name: str) -> Tensor:
        """Return a weight: the tensor itself, or an unpacked copy."""
        return self._packed[name].read() if name in self._packed else self.state[name]

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Replace a weight's values. They are converted to its dtype and device."""
        if isinstance(packed := self._packed.get(name), _PackedLinear):
            packed.write(value)
        else:
            self.state[name].copy_(value)


GROUP = 128
"""Number of neighbouring inputs that share a scale and zero point in int4, as in most AWQ and GPTQ checkpoints."""


@torch.no_grad()
def quantize(model: PreTrainedModel, kind: Literal["int8", "int4"]) -> None:
    """Round in place, to nearest, the weights of all linear modules in the language model's layers, which stay at full
    precision: this shows how a quantised server affects learning. Other weights and adapters stay unchanged, as in
    vLLM's quantised checkpoints.

    int8: symmetric, one scale per output channel. int4: 16 levels from the smallest weight to the largest, including 0,
    per group of GROUP inputs of an output channel. Raises UnsupportedModel if other modules have weight matrices."""
    language = model.get_decoder()
    embeddings = [module for module in language.modules() if isinstance(module, nn.Embedding)]
    kept = {id(weight) for module in embeddings for weight in module.parameters()}
    linear = {name: module for name, module in language.named_modules() if isinstance(module, nn.Linear)}
    weights = {f"{name}.weight": module.weight for name, module in linear.items()}
    for name, parameter in language.named_parameters():
        if parameter.dim() > 1 and name not in weights and id(parameter) not in kept:
            raise UnsupportedModel(f"--quantization rounds linear modules only, and {name} belongs to another one")
    for weight in weights.values():
        for part in weight.split(weight.shape[1] if kind == "int8" else GROUP, dim=1):
            part.copy_(_symmetric(part.float()) if kind == "int8" else _asymmetric(part.float()))


@torch.no_grad()
def compute_in_int8(model: PreTrainedModel) -> None:
    """Compute the large layers of a model on an x86 CPU with products of integers: weights with a scale per output
    channel, each row of the input with one of its own (Dettmers et al., 2022, arXiv:2208.07339, section 2.1), so that
    it depends on no other request. Elsewhere do nothing."""
    if not onednn_packs(torch.float32):
        return
    most = largest_step()
    for module in model.get_decoder().modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.numel() >= WHOLE:
            module.forward = Int8Linear(module, most)  # type: ignore[assignment, method-assign]


def largest_step() -> int:
    """Return the largest integer for weights: without AVX512_VNNI, sums of two products would saturate at 16 bits."""
    full = torch.full((8, 8), 127, dtype=torch.int8)
    return 127 if int(torch._int_mm(full, full)[0, 0]) == 8 * 127**2 else 63


class Int8Linear:
    """The forward pass of one linear module in int8, with weights of at most `most` steps. Measured on an EPYC with
    torch 2.13 and two threads, 4864 x 896 takes .16 of float32's time with 8 rows, .26 with 32, .23 with 256; without
    AVX-512, .23, .37, .43."""

    whole = True

    def __init__(self, module: nn.Linear, most: int) -> None:
        weight = module.weight.detach()
        self._bias, self._dtype = module.bias, weight.dtype
        self._scales = _nonzero(weight.float().abs().amax(1) / most)
        self._levels = (weight.float() / self._scales[:, None]).round().to(torch.int8)
        module.weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)

    def read(self) -> Tensor:
        """Return a copy of the rounded weight."""
        return (self._levels.float() * self._scales[:, None]).to(self._dtype)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        scale = _nonzero(rows.abs().amax(1, keepdim=True) / 127)
        levels = (rows / scale).round_().to(torch.int8)
        y: Tensor = torch._int_mm(levels, self._levels.t()).float().mul_(scale).mul_(self._scales)
        if self._bias is not None:
            y += self._bias
        return y.to(x.dtype).view(*x.shape[:-1], -1)


def _symmetric(weight: Float[Tensor, "out group"]) -> Float[Tensor, "out group"]:
    """Round to 255 levels, -127 to 127 times the scale."""
    scale = _nonzero(weight.abs().amax(1, keepdim=True) / 127)
    return (weight / scale).round() * scale


def _asymmetric(weight: Float[Tensor, "out group"]) -> Float[Tensor, "out group"]:
    """Round to 16 levels, (0 to 15 minus the zero point) times the scale."""
    low, high = weight.amin(1, keepdim=True).clamp(max=0), weight.amax(1, keepdim=True).clamp(min=0)
    scale = _nonzero((high - low) / 15)
    zero = (-low / scale).round()
    return ((weight / scale).round() + zero).clamp(0, 15).sub(zero) * scale


def _nonzero(scale: Tensor) -> Tensor:
    """Replace scales of 0, so that weights that are all 0 stay 0."""
    return scale.where(scale > 0, 1.0)

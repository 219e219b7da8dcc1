"""Fake quantisation: weights rounded to values that few bits can represent, but stored and used at full precision.

It shows on any machine how a quantised server affects learning, but saves neither memory nor time. Weights are rounded
to nearest, without the calibration of AWQ or GPTQ, so the error is larger than in their checkpoints.
"""

from collections.abc import Awaitable, Callable
from typing import Literal

import torch
from aiohttp import web
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentfactory.rollout.inference.embedded.sampling import UnsupportedModel

Quantization = Literal["int8", "int4"]

GROUP = 128
"""Number of neighbouring inputs that share a scale and zero point in int4, as in most AWQ and GPTQ checkpoints."""

FULL_WEIGHTS = frozenset(
    {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
)
"""Routes that transfer full weights."""

Dispatch = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@torch.no_grad()
def quantize(model: PreTrainedModel, kind: Quantization) -> None:
    """Round in place the weights of all linear modules in the language model's layers. Embeddings, norms, biases, the
    head and a vision tower stay unchanged, as in vLLM's quantised checkpoints.

    int8: symmetric, one scale per output channel. int4: asymmetric (16 levels from the smallest weight to the largest,
    including 0), per group of GROUP inputs of an output channel, or fewer at the end. Adapters are added on top and are
    not rounded. Raises UnsupportedModel if other modules have weight matrices, which would not be rounded.
    """
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


def adapters_only(dispatch: Dispatch, kind: Quantization) -> Dispatch:
    """Wrap `dispatch` to refuse full weights: after rounding, they would differ from the trainer's, and no checksum
    could prove them."""

    async def guarded(request: web.BaseRequest) -> web.StreamResponse:
        if request.path not in FULL_WEIGHTS:
            return await dispatch(request)
        message = (
            f"this server's weights are rounded (--quantization {kind}): it accepts adapters, not full weights; train "
            "an adapter (model.lora.rank), or serve the model without server.quantization"
        )
        body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
        return web.json_response(body, status=400)

    return guarded

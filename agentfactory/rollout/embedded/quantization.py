"""Fake quantisation: weights rounded to what few bits can hold, and computed with as before.

It shows what a quantised server does to learning, on any machine: it saves no memory and no time. Rounding is to
nearest, without the calibration of AWQ or GPTQ, so that it errs more than their checkpoints do.
"""

from collections.abc import Awaitable, Callable
from typing import Literal

import torch
from aiohttp import web
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentfactory.rollout.embedded.engine import UnsupportedModel

Quantization = Literal["int8", "int4"]

GROUP = 128
"""Neighbouring inputs that share scale and zero point in int4, as in most AWQ and GPTQ checkpoints."""

FULL_WEIGHTS = frozenset(
    {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
)
"""The routes by which full weights would come."""

Dispatch = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@torch.no_grad()
def quantize(model: PreTrainedModel, kind: Quantization) -> None:
    """Round the weights of all linear modules below the head, in place; embeddings, norms, biases and the head stay, as
    vLLM's quantised checkpoints have them.

    int8: symmetric, one scale per output channel. int4: asymmetric (16 levels from the least weight to the largest, 0
    among them), per group of GROUP inputs of an output channel, or fewer where its inputs end. Adapters act on top, and
    are not rounded. Raises UnsupportedModel where other modules than linear ones multiply by matrices: they would be
    left as they are.
    """
    head = model.get_output_embeddings()
    kept = {
        id(weight) for module in (head, *_embeddings(model)) if module is not None for weight in module.parameters()
    }
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights = {f"{name}.weight": module.weight for name, module in linear.items() if id(module.weight) not in kept}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and name not in weights and id(parameter) not in kept:
            raise UnsupportedModel(f"--quantization rounds linear modules only, and {name} belongs to another one")
    for weight in weights.values():
        for part in weight.split(weight.shape[1] if kind == "int8" else GROUP, dim=1):
            part.copy_(_symmetric(part.float()) if kind == "int8" else _asymmetric(part.float()))


def _embeddings(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def _symmetric(weight: Float[Tensor, "out group"]) -> Float[Tensor, "out group"]:
    """255 levels, -127 to 127 times the scale."""
    scale = _nonzero(weight.abs().amax(1, keepdim=True) / 127)
    return (weight / scale).round() * scale


def _asymmetric(weight: Float[Tensor, "out group"]) -> Float[Tensor, "out group"]:
    """16 levels, 0 to 15 less the zero point, times the scale."""
    low, high = weight.amin(1, keepdim=True).clamp(max=0), weight.amax(1, keepdim=True).clamp(min=0)
    scale = _nonzero((high - low) / 15)
    zero = (-low / scale).round()
    return ((weight / scale).round() + zero).clamp(0, 15).sub(zero) * scale


def _nonzero(scale: Tensor) -> Tensor:
    """Weights that are all 0 stay so."""
    return scale.where(scale > 0, 1.0)


def adapters_only(dispatch: Dispatch, kind: Quantization) -> Dispatch:
    """`dispatch`, with full weights refused: rounded again they would not be the trainer's, and no checksum could prove
    them."""

    async def guarded(request: web.BaseRequest) -> web.StreamResponse:
        if request.path not in FULL_WEIGHTS:
            return await dispatch(request)
        message = (
            f"this server's weights are rounded (--quantization {kind}): it takes adapters, not full weights; train "
            "an adapter (model.lora.rank), or serve the model without server.quantization"
        )
        body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
        return web.json_response(body, status=400)

    return guarded

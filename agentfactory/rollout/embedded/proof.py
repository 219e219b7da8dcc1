"""Proves at start that the engine computes what the model's own forward pass does, to reject unknown model features."""

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from agentfactory.rollout.embedded.request import Request, UnsupportedModel

if TYPE_CHECKING:
    from agentfactory.rollout.embedded.engine import Engine
    from agentfactory.rollout.embedded.image_encoder import ImageEncoder

logger = logging.getLogger(__name__)


def prove(engine: "Engine") -> None:
    """Decode a few tokens after a text, and after an image if the model sees, and compare with the model's own
    attention and image positions. Raises UnsupportedModel."""
    size = min(24, engine.max_model_len)
    text = np.arange(1, size // 2 + 1) * 7 % engine.vocab_size
    _compare(engine, Request(text, size - len(text), lambda r: None, temperature=0.0), {})
    if engine.encoder is not None:
        _compare(engine, *_request_with_image(engine, engine.encoder, text))


def prove_static(engine: "Engine") -> None:
    """Make the same comparison with static steps. If they cannot be captured, warn and decode without them."""
    try:
        prove(engine)
    except (RuntimeError, UnsupportedModel) as error:
        if engine.device.type != "cuda":
            raise
        engine.static = None
        for request in engine.requests():
            engine.abort(request)
        engine.reset_prefix_cache()
        logger.warning("decoding goes without CUDA graphs, which makes it slower: %s", error)


def _request_with_image(
    engine: "Engine", encoder: "ImageEncoder", text: np.ndarray
) -> tuple[Request, dict[str, torch.Tensor]]:
    """Return a request with a small image, and the arguments by which the model itself sees it."""
    from PIL import Image  # not for models that read only text

    images, vision = encoder.images, encoder.images.vision
    noise = np.random.default_rng(0).integers(0, 255, (64, 32, 3), dtype=np.uint8)
    held = images.hold(vision.fit(Image.fromarray(noise)))
    text = text[~np.isin(text, vision.banned_token_ids)]
    prompt, placed = images.place([*text.tolist(), vision.image_token_id, *text.tolist()], [held])
    request = Request(prompt, 12, lambda r: None, temperature=0.0, images=placed)
    if len(prompt) + request.max_tokens > engine.max_model_len:
        raise UnsupportedModel(
            f"max_model_len {engine.max_model_len} is too small for an image of {held.tokens} tokens"
        )
    # the model's own forward pass would take a sampled one for a further image
    request.logit_bias = dict.fromkeys(vision.banned_token_ids, -100.0)
    arguments = encoder.pixels([held])
    kinds = np.concatenate([prompt < 0, np.zeros(request.max_tokens, bool)])
    arguments["mm_token_type_ids"] = torch.from_numpy(kinds).int()[None].to(engine.device)
    return request, arguments


@torch.inference_mode()
def _compare(engine: "Engine", request: Request, arguments: dict[str, torch.Tensor]) -> None:
    """Decode a request and compare with the model's own forward pass, which takes `arguments`."""
    model, language = engine.model, engine.model.get_decoder()
    language.set_attn_implementation(engine.attention_name)
    engine.add(request)
    while engine.busy:
        engine.step()
    language.set_attn_implementation("sdpa")
    start = len(request.prompt) - 1
    ids = torch.tensor([*request.token_ids, *request.tokens], device=engine.device)
    logits = model(input_ids=ids[None], use_cache=False, **arguments).logits[0, start:-1].float()
    for token, bias in request.logit_bias.items():
        logits[:, token] += bias
    expected = torch.log_softmax(logits, -1).gather(1, ids[start + 1 :, None])[:, 0].cpu()
    language.set_attn_implementation(engine.attention_name)
    engine.reset_prefix_cache()
    drift = float((torch.tensor(request.logprobs) - expected).abs().max())
    if not drift < (1e-3 if model.dtype == torch.float32 else 0.5):
        where = "after an image " if request.images else ""
        raise UnsupportedModel(
            f"{type(model).__name__}: log-probabilities {where}differ by {drift:.2g} from the model's own attention"
        )

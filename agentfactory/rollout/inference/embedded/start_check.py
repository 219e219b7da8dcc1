"""Startup checks that the engine computes the same as the model's own forward pass."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentfactory.rollout.inference.embedded.packed_linear import Int8Linear
from agentfactory.rollout.inference.embedded.sampling import Request, UnsupportedModel

if TYPE_CHECKING:
    from agentfactory.rollout.inference.embedded.image_encoder import ImageEncoder

SAMPLED = 12  # most tokens that a request samples
SHORTEST = 48
"""Minimum length of the longest request, so that another one waits for a prefix of its prompt."""


@torch.inference_mode()
def check_last_position(model: PreTrainedModel, max_model_len: int) -> None:
    """Raise UnsupportedModel if the model's table of positions, such as GPT-2's, is shorter than a sequence may be."""
    last = torch.tensor([[max_model_len - 1]], device=model.device)
    try:
        model(input_ids=torch.ones_like(last), position_ids=last, use_cache=False)
    except (IndexError, torch.AcceleratorError) as error:
        problem = f"{type(model).__name__} has no position {max_model_len - 1}: lower server.max_model_len"
        raise UnsupportedModel(f"{problem} ({error})") from error


class Proof(NamedTuple):
    """A request for the engine, and the image arguments for the model's own forward pass."""

    request: Request
    arguments: dict[str, Tensor]

    @torch.inference_mode()
    def check(self, model: PreTrainedModel) -> None:
        """Compare the engine's samples with the forward pass of `model`, whose own attention must be restored. Raises
        UnsupportedModel if they differ."""
        request, start = self.request, len(self.request.prompt) - 1
        device = next(model.get_input_embeddings().parameters()).device
        ids = torch.tensor([*request.token_ids, *request.tokens], device=device)
        logits = model(input_ids=ids[None], use_cache=False, **self.arguments).logits[0, start:-1].float()
        for token, bias in request.logit_bias.items():
            logits[:, token] += bias
        expected = torch.log_softmax(logits, -1).gather(1, ids[start + 1 :, None])[:, 0].cpu()
        drifts = (torch.tensor(request.logprobs) - expected).abs()
        rounds = any(isinstance(module.forward, Int8Linear) for module in model.modules())
        is_exact = model.dtype == torch.float32 and not rounds
        # single tokens differ by up to .6 by rounding in half precision or int8, but not most of them
        drift = float(drifts.max() if is_exact else drifts.median())
        if not drift < (1e-3 if is_exact else 0.1):
            where = "after an image " if request.images else ""
            problem = f"log-probabilities {where}differ by {drift:.2g} from the model's own attention"
            raise UnsupportedModel(f"{type(model).__name__}: {problem}")


def proofs(encoder: "ImageEncoder | None", vocab_size: int, max_model_len: int, beyond: int) -> Iterator[Proof]:
    """Yield requests to decode together: texts of different lengths, one with a prefix of another, one longer than
    `beyond` tokens; and an image for a vision-language model. Raises UnsupportedModel if that is too long."""
    size = min(max(SHORTEST, beyond + 2 * SAMPLED), max_model_len)
    whole = max(1, size - SAMPLED)
    # the model's own forward pass would treat an image token as an image
    bias = {} if encoder is None else dict.fromkeys(encoder.images.vision.banned_token_ids, -100.0)
    allowed = np.setdiff1d(np.arange(vocab_size), list(bias))
    text, other = (allowed[np.arange(1, whole + 1) * step % len(allowed)] for step in (7, 11))
    for prompt in (text, other[:1], other[: 1 + whole // 4], np.append(text[: whole - whole // 4], other[:2])):
        if len(prompt) < max_model_len:
            most = min(SAMPLED, max_model_len - len(prompt))
            yield Proof(Request(prompt, most, lambda r: None, temperature=0.0, logit_bias=bias), {})
    if encoder is not None:
        yield _proof_with_image(encoder, text[: SAMPLED + beyond], bias, max_model_len)


def _proof_with_image(encoder: "ImageEncoder", text: np.ndarray, bias: dict[int, float], max_model_len: int) -> Proof:
    from PIL import Image  # text models do not need it

    images, vision = encoder.images, encoder.images.vision
    noise = np.random.default_rng(0).integers(0, 255, (64, 32, 3), dtype=np.uint8)
    held = images.hold(vision.fit(Image.fromarray(noise)))
    prompt, placed = images.place([*text.tolist(), vision.image_token_id, *text.tolist()], [held])
    if len(prompt) + SAMPLED > max_model_len:
        raise UnsupportedModel(f"max_model_len {max_model_len} is too small for an image of {held.tokens} tokens")
    request = Request(prompt, SAMPLED, lambda r: None, temperature=0.0, images=placed, logit_bias=bias)
    arguments = encoder.pixels([held])
    kinds = np.concatenate([prompt < 0, np.zeros(SAMPLED, bool)])
    arguments["mm_token_type_ids"] = torch.from_numpy(kinds).int()[None].to(arguments["pixel_values"].device)
    return Proof(request, arguments)

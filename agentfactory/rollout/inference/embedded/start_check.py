"""Startup checks that the engine computes the same as the model's own forward pass."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentfactory.rollout.inference.embedded.sampling import Request, UnsupportedModel

if TYPE_CHECKING:
    from agentfactory.rollout.inference.embedded.image_encoder import ImageEncoder

SAMPLED = 12
"""Maximum number of tokens that a request samples."""
LONGEST = 512
"""Largest sliding window that the prompt exceeds. Longer prompts would delay the start."""


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
        drift = float((torch.tensor(request.logprobs) - expected).abs().max())
        if not drift < (1e-3 if model.dtype == torch.float32 else 0.5):
            where = "after an image " if request.images else ""
            raise UnsupportedModel(
                f"{type(model).__name__}: log-probabilities {where}differ by {drift:.2g} from the model's own attention"
            )


def proofs(
    encoder: "ImageEncoder | None", vocab_size: int, max_model_len: int, window: int | None = None
) -> Iterator[Proof]:
    """Yield a text request, and a request with an image for a vision-language model. The text is longer than a sliding
    window of at most LONGEST tokens. Raises UnsupportedModel if `max_model_len` is too short for an image."""
    beyond = window if window is not None and window <= LONGEST else 0
    size = min(2 * SAMPLED + beyond, max_model_len)
    text = np.arange(1, max(1, size - SAMPLED) + 1) * 7 % vocab_size
    yield Proof(Request(text, size - len(text), lambda r: None, temperature=0.0), {})
    if encoder is not None:
        yield _proof_with_image(encoder, text, max_model_len)


def _proof_with_image(encoder: "ImageEncoder", text: np.ndarray, max_model_len: int) -> Proof:
    from PIL import Image  # text models do not need it

    images, vision = encoder.images, encoder.images.vision
    noise = np.random.default_rng(0).integers(0, 255, (64, 32, 3), dtype=np.uint8)
    held = images.hold(vision.fit(Image.fromarray(noise)))
    text = text[~np.isin(text, vision.banned_token_ids)]
    prompt, placed = images.place([*text.tolist(), vision.image_token_id, *text.tolist()], [held])
    if len(prompt) + SAMPLED > max_model_len:
        raise UnsupportedModel(f"max_model_len {max_model_len} is too small for an image of {held.tokens} tokens")
    request = Request(prompt, SAMPLED, lambda r: None, temperature=0.0, images=placed)
    # the model's own forward pass would treat a sampled image token as another image
    request.logit_bias = dict.fromkeys(vision.banned_token_ids, -100.0)
    arguments = encoder.pixels([held])
    kinds = np.concatenate([prompt < 0, np.zeros(SAMPLED, bool)])
    arguments["mm_token_type_ids"] = torch.from_numpy(kinds).int()[None].to(arguments["pixel_values"].device)
    return Proof(request, arguments)

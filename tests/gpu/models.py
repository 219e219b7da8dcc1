"""What the GPU tests run on: models made on the spot, and recipes for them."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentfactory.trainers.config import TrainRecipe
from tests.placement.shapes import sizes

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
NEEDS_FP8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8"
)
DEVICE = "cuda"
VOCABULARY = 512


def needs(package: str) -> pytest.MarkDecorator:
    """Skips a test where `package` is not installed."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def make_model(folder: Path, width: int, layers: int, vocabulary: int = VOCABULARY) -> Path:
    """Saves a random Qwen3 whose head is tied to its embeddings."""
    torch.manual_seed(0)
    shape: dict[str, Any] = sizes(width, 3 * width, layers, width // 64, width // 128, vocabulary)
    shape |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = Qwen3Config(**shape, head_dim=64, tie_word_embeddings=True, initializer_range=0.05)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def recipe(path: Path, dtype: str = "float32", lora: dict[str, Any] | None = None, **train: Any) -> TrainRecipe:
    """One step on the model in `path`."""
    model = {"path": str(path), "dtype": dtype, "lora": lora}
    return TrainRecipe.model_validate({"model": model, "train": {"steps": 1, **train}})

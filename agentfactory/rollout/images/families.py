"""The families of models that see, and how each does.

Two ways lead to the tokens of an image. Families of `patches` have one rule for sizes, and images are resized once,
here. All others are left to the model's own processor (own_processor), which the server runs, too.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers.utils.hub import cached_file

from agentfactory.rollout.config import ModelConfig
from agentfactory.rollout.images.own_processor import OwnProcessor, load_own_processor
from agentfactory.rollout.images.patches import patch_vision
from agentfactory.rollout.images.vision import Vision
from agentfactory.tools.errors import SettingError
from agentfactory.tools.images.coordinates import Coordinates, ModelView
from agentfactory.tools.user_code.import_path import is_installed

BY_PATCHES = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe"}
)
"""Values of model_type whose images are resized and placed as in Qwen2-VL (arXiv:2409.12191, section 2.1)."""
STATED = {
    "qwen2_vl": Coordinates.RELATIVE1000,
    "qwen2_5_vl": Coordinates.RESIZED,
    "qwen3_vl": Coordinates.RELATIVE1000,
    "qwen3_vl_moe": Coordinates.RELATIVE1000,
    "qwen3_5": Coordinates.RELATIVE1000,
    "qwen3_5_moe": Coordinates.RELATIVE1000,
    "glm4v": Coordinates.RELATIVE1000,
    "glm4v_moe": Coordinates.RELATIVE1000,
    "internvl": Coordinates.RELATIVE1000,
}
"""Value of model_type -> how its models have learned to state places in images. The others learned none, or several."""
BY_OWN_PROCESSOR = frozenset({"internvl", "mistral3", "idefics3", "smolvlm"})
"""Values of model_type whose images are left to their own processor. The positions of their tokens are one-dimensional,
and images change nothing in the attention."""
UNSEEN = {
    "gemma3": "the tokens of an image see each other in both directions, and rows here attend causally",
    "gemma4": "it has sizes in which the tokens of an image see each other in both directions, and rows here attend "
    "causally",
}
"""Values of model_type whose images are not supported, with the reason."""


def is_seen(model_type: str) -> bool:
    """Return whether images of models of this kind are supported here. Processors of transformers that resize as
    servers do need torchvision."""
    return model_type in BY_PATCHES or (model_type in BY_OWN_PROCESSOR and is_installed("torchvision"))


def why_unseen(path: str) -> str:
    """Return why the images of the model at `path` are not supported."""
    config = _read(path, "config.json")
    kind = config.get("model_type")
    if "vision_config" not in config:
        return f"{path} reads only text"
    if kind in BY_OWN_PROCESSOR:
        return f"{path} ({kind}) needs torchvision for its images, which is not installed"
    if kind in UNSEEN:
        return f"{path} ({kind}): {UNSEEN[kind]}"
    return f"{path} sees as {kind} does, which is not supported"


def load_vision(path: str, min_pixels: int | None = None, max_pixels: int | None = None) -> Vision | None:
    """Return how the model at `path`, a folder or hub name, sees; None if it reads only text, or sees in a way that is
    not supported (see why_unseen): its chains are of text, then.

    `min_pixels` and `max_pixels` are the recipe's limits. Raises SettingError if the model has no processor, or the
    limits cannot be kept.
    """
    config = _read(path, "config.json")
    kind = config.get("model_type", "")
    if "vision_config" not in config or not is_seen(kind):
        return None
    processor = _read(path, "preprocessor_config.json") or _read(path, "processor_config.json").get("image_processor")
    if not processor:
        problem = f"{path} has no preprocessor_config.json, which says how images are resized"
        raise SettingError("model.path", problem, "add the file of the original model")
    banned = banned_token_ids(config)
    if kind in BY_PATCHES:
        return patch_vision(config, processor, banned, min_pixels, max_pixels)
    return OwnProcessor(banned[0], banned, load_own_processor(path), min_pixels, max_pixels)


def model_type(path: str) -> str:
    """Return the model_type of the model at `path`, a folder or hub name; empty if it says none."""
    return str(_read(path, "config.json").get("model_type") or "")


def view_of(path: str, vision: Vision | None, coordinates: str = "auto") -> ModelView | None:
    """Return how the model at `path`, which sees by `vision`, states places in images: by its family if `coordinates`
    is auto, and else as it says. None if it sees none, or the family is known for no way.

    Raises SettingError if places are pixels of the image as the model gets it, and its own processor resizes it.
    """
    if vision is None:
        return None
    stated = STATED.get(model_type(path)) if coordinates == "auto" else Coordinates(coordinates)
    if stated is Coordinates.RESIZED and vision.sizes is None:
        problem = f"got resized, and {path} resizes images within its own processor"
        raise SettingError("rollout.coordinates", problem, "use relative1000, relative1 or pixels, as it has learned")
    return None if stated is None else ModelView(stated, vision.sizes)


def view_of_model(model: ModelConfig, coordinates: str) -> ModelView | None:
    """Return how a recipe's model states places in images; None if it sees none, or its way is not known. Raises
    SettingError, and FileNotFoundError if the model's files are not on this machine: the hub is not asked."""
    folder = model.path if os.path.isabs(model.path) else _downloaded(model.path)
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"there is no {folder} yet")
    vision = load_vision(folder, model.min_image_pixels, model.max_image_pixels)
    return view_of(folder, vision, coordinates)


def _downloaded(name: str) -> str:
    """Return the folder with the files of a model of the hub that say how it sees. Raises FileNotFoundError."""
    config, *processors = (
        try_to_load_from_cache(name, file)
        for file in ("config.json", "preprocessor_config.json", "processor_config.json")
    )
    if not isinstance(config, str) or not any(isinstance(file, str) for file in processors):
        fix = f"hf download {name} config.json preprocessor_config.json"
        raise FileNotFoundError(f"its files are not on this machine; fix: {fix}")
    return str(Path(config).parent)


def banned_token_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the tokens that stand for images and videos, those of images first, from a model's configuration."""
    image = config.get("image_token_id", config.get("image_token_index"))
    return tuple(i for i in (image, config.get("video_token_id")) if i is not None)


def copy_processor(path: str, folder: Path) -> None:
    """Copy the files that say how the model at `path` gets images and videos, if it has them."""
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        if file := cached_file(path, name, _raise_exceptions_for_missing_entries=False):
            shutil.copyfile(file, folder / name)


def _read(path: str, name: str) -> dict[str, Any]:
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}

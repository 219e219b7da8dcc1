"""Families of multimodal models and their image processing. Families of `patches` share one rule for image sizes, by
which images are resized here; all others use the model's own processor, as the server does."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers.utils.hub import cached_file

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.import_path import is_installed
from agentfactory.rollout.config import ModelConfig
from agentfactory.rollout.images.image_tokens import OwnProcessor, Vision, load_own_processor, patch_vision
from agentfactory.tools.images.coordinates import Coordinates, ModelView

BY_PATCHES = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe"}
)
"""Values of model_type with image sizes and positions as in Qwen2-VL (arXiv:2409.12191, section 2.1)."""
STATED = {**dict.fromkeys([*BY_PATCHES, "internvl"], Coordinates.RELATIVE1000), "qwen2_5_vl": Coordinates.RESIZED}
"""Value of model_type -> the coordinate system that its models learned. Other models learned none, or several."""
BY_OWN_PROCESSOR = frozenset({"internvl", "mistral3", "idefics3", "smolvlm"})
"""Values of model_type whose images their own processor converts, with one-dimensional positions and causal masks."""
WITHOUT_IMAGES = {
    "gemma3": "the tokens of an image attend to each other in both directions, but rows here attend causally",
    "gemma4": "in some sizes, the tokens of an image attend to each other in both directions, but rows here attend "
    "causally",
}
"""Values of model_type whose images are not supported, with the reason."""


def supports_images(model_type: str) -> bool:
    """Return whether images of this model_type are supported. Models with their own processor need torchvision."""
    return model_type in BY_PATCHES or (model_type in BY_OWN_PROCESSOR and is_installed("torchvision"))


def why_no_images(path: str) -> str:
    config = _read(path, "config.json")
    kind = config.get("model_type")
    # omni models nest their parts
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    if not any("vision_config" in part for part in parts):
        return f"{path} accepts only text"
    if kind in BY_OWN_PROCESSOR:
        return f"{path} ({kind}) needs torchvision for its images, which is not installed"
    if kind in WITHOUT_IMAGES:
        return f"{path} ({kind}): {WITHOUT_IMAGES[kind]}"
    return f"{path} is of the family {kind}, whose images are not supported"


def load_vision(path: str, min_pixels: int | None = None, max_pixels: int | None = None) -> Vision | None:
    """Return the image processing of the model at `path`, a folder or hub name; None if its chains are text only (see
    why_no_images). Raise SettingError if it has no processor, or if the limits contradict each other."""
    config = _read(path, "config.json")
    kind = config.get("model_type", "")
    if "vision_config" not in config or not supports_images(kind):
        return None
    processor = _read(path, "preprocessor_config.json") or _read(path, "processor_config.json").get("image_processor")
    if not processor:
        problem = f"{path} has no preprocessor_config.json, which defines how images are resized"
        raise SettingError("model.path", problem, "add the file of the original model")
    banned = banned_token_ids(config)
    if kind in BY_PATCHES:
        return patch_vision(config, processor, banned, min_pixels, max_pixels)
    return OwnProcessor(banned[0], banned, load_own_processor(path), min_pixels, max_pixels)


def model_type(path: str) -> str:
    """Return the model_type of the model at `path`, a folder or hub name; empty if its configuration has none."""
    return str(_read(path, "config.json").get("model_type") or "")


def view_of(path: str, vision: Vision | None, coordinates: str = "auto") -> ModelView | None:
    """Return the coordinate system of the model at `path`: by `coordinates`, or if auto, its family's; None if unknown
    or without `vision`. Raise SettingError for resized if the model's own processor resizes images."""
    if vision is None:
        return None
    stated = STATED.get(model_type(path)) if coordinates == "auto" else Coordinates(coordinates)
    if stated is Coordinates.RESIZED and vision.sizes is None:
        problem = f"got resized, but {path} resizes images within its own processor"
        raise SettingError("rollout.coordinates", problem, "use relative1000, relative1 or pixels, as it learned")
    return None if stated is None else ModelView(stated, vision.sizes)


def view_of_model(model: ModelConfig, coordinates: str) -> ModelView | None:
    """Return the coordinate system of a recipe's model, from local files; None if there is none or it is unknown. Raise
    SettingError as `view_of` does, and FileNotFoundError if the files are not on this machine."""
    folder = model.path
    if not os.path.isabs(folder):
        names = ("config.json", "preprocessor_config.json", "processor_config.json")
        config, *processors = (try_to_load_from_cache(folder, name) for name in names)
        if not isinstance(config, str) or not any(isinstance(file, str) for file in processors):
            fix = f"hf download {folder} config.json preprocessor_config.json"
            raise FileNotFoundError(f"its files are not on this machine; fix: {fix}")
        folder = str(Path(config).parent)
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"the folder {folder} does not exist yet")
    vision = load_vision(folder, model.min_image_pixels, model.max_image_pixels)
    return view_of(folder, vision, coordinates)


def banned_token_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the image and video tokens in a model's configuration, image tokens first."""
    image = config.get("image_token_id", config.get("image_token_index"))
    return tuple(i for i in (image, config.get("video_token_id")) if i is not None)


def copy_processor(path: str, folder: Path) -> None:
    """Copy the image and video processor files of the model at `path`, if it has them, to `folder`."""
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        if file := cached_file(path, name, _raise_exceptions_for_missing_entries=False):
            shutil.copyfile(file, folder / name)


def _read(path: str, name: str) -> dict[str, Any]:
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}

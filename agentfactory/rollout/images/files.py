"""Conversion of a row's images to files, which tools and rewards get."""

from pathlib import Path
from typing import Any

from agentfactory.rollout.images.store import ImageStore
from agentfactory.tools.images.decode import decode, is_path


def is_file(image: Any) -> bool:
    """Return whether an image of a row is the path of an existing file."""
    return is_path(image) and Path(image).is_file()


def with_files(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a row of data with `images` as paths: paths in the data stay, and images given as data become lossless
    files in `folder`. Raise ValueError if an image cannot be decoded."""
    if "images" not in task:
        return task
    store = ImageStore(folder)
    return {**task, "images": [i if is_file(i) else str(store.path(store.put(decode(i)))) for i in task["images"]]}

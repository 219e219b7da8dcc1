"""Tasks in Harbor's format as rows: `data.harbor`."""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import field_validator, model_validator

from agentfactory.rollout.config import TaskSource
from agentfactory.tools.config import Section
from agentfactory.worlds.harbor.task import Image, load_rows


class HarborImage(Section):
    """What stands for an image that Harbor tasks begin with. A path alone stands for {root: PATH}."""

    root: str
    """Folder with a root file system, shown read-only; `/` shows this machine's programs, libraries and /etc."""
    run_done: bool = False
    """The RUN instructions of its tasks were done in it. Otherwise tasks that have some are refused."""
    writable: list[str] = []
    """Folders in it that tasks may change; each chain gets a copy. The tasks' WORKDIR, the folders that they COPY to,
    /root and /tmp are copied anyway."""


class HarborSource(TaskSource):
    """Tasks in Harbor's format, for `tools: [harbor]` (docs/harbor.md). A path alone stands for {folder: PATH}."""

    paths: ClassVar[tuple[str, ...]] = ("", "folder", "images.*", "images.*.root")

    folder: str
    """Folder with a folder for each task, or the folder of one."""
    images: dict[str, HarborImage] = {}
    """FROM of the tasks' Dockerfiles -> the root file system that stands for it."""

    @model_validator(mode="before")
    @classmethod
    def _folder_alone(cls, given: Any) -> Any:
        return {"folder": given} if isinstance(given, str) else given

    @field_validator("images", mode="before")
    @classmethod
    def _root_alone(cls, images: Any) -> Any:
        if not isinstance(images, dict):
            return images
        return {name: {"root": image} if isinstance(image, str) else image for name, image in images.items()}

    def rows(self) -> list[dict[str, Any]]:
        """See TaskSource."""
        images = {name: Image(image.root, image.run_done, tuple(image.writable)) for name, image in self.images.items()}
        return load_rows(Path(self.folder), images, "harbor")

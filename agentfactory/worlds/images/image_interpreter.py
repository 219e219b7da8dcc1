"""`ImageInterpreter`: the image tools, and Python on the same images."""

import asyncio
from collections.abc import Sequence
from io import BytesIO
from typing import Any, ClassVar

from agentfactory.tools.prebuilt.code_interpreter import CodeInterpreter
from agentfactory.tools.tool import tool
from agentfactory.worlds.images.image_tools import ImageTools
from agentfactory.worlds.images.pictures import Picture

_SHOWN_FILES = ("*.png", "*.jpg", "*.jpeg")
_FILES_MB = 32
"""Maximum total size of the images that a cell saves, in MiB."""
_MOST_SHOWN = 8


class ImageInterpreter(ImageTools):
    """`ImageTools` with a tool `python`, which gets the chain's images as files and shows the images that it saves.

    Code runs as in `CodeInterpreter`: in the chain's own sandbox, cell by cell.

    Args:
        labels: see ImageTools.
        least: see ImageTools.
        sandbox: see CodeInterpreter for this and all following options.
        seconds: time limit of a cell.
        memory_mb: address space of the process, in MiB.
        disk_mb: size of the workspace, in MiB of memory.
        output_characters: characters of a cell's output that the model gets.
        packages: installed distributions that the code can import.

    Raises:
        ValueError: an option is out of range, or a package is not installed.
        SandboxUnavailable: bubblewrap, or a Python for the sandbox, is missing.
    """

    sandboxed: ClassVar[bool] = True

    def __init__(
        self,
        labels: bool = True,
        least: int | None = None,
        sandbox: str = "bubblewrap",
        seconds: float = 10.0,
        memory_mb: int = 1024,
        disk_mb: int = 128,
        output_characters: int = 10_000,
        packages: Sequence[str] = ("numpy", "pillow"),
    ) -> None:
        super().__init__(labels, least)
        self._interpreter = CodeInterpreter(
            sandbox, seconds, memory_mb, disk_mb, output_characters, packages, None, _SHOWN_FILES, _FILES_MB
        )
        self._written = 0
        """Number of the chain's images already written to the workspace."""

    async def reset(  # type: ignore[override]  # either kind of method may override the other
        self, images: list[Any], model_view: dict[str, Any] | None = None, **task: Any
    ) -> str | None:
        opening = await asyncio.to_thread(super().reset, images, model_view, **task)
        await self._interpreter.reset()
        return opening

    @tool
    async def python(self, code: str) -> Any:
        """Run Python code on the images, which are the files image_0.png, image_1.png and so on. Variables are kept
        from call to call. Returns what it prints and the value of its last line, and shows the images that it saves as
        .png or .jpg.

        Args:
            code: The code, of one line or more.
        """
        first = 0 if self._interpreter.empty else self._written
        numbers = range(first, len(self._pictures))
        new = {f"image_{number}.png": await asyncio.to_thread(_png, self._pictures[number]) for number in numbers}
        cell = await self._interpreter.run(code, new)
        self._written = first + len(new)
        observation: list[Any] = [cell.text]
        saved: dict[str, int] = {}
        for name, content in cell.files.items():
            try:
                if content is None:
                    raise ValueError(f"the images of a call may have {_FILES_MB} MiB")
                if len(saved) == _MOST_SHOWN:
                    raise ValueError(f"a call may show {_MOST_SHOWN} images")
                made = Picture(content, len(self._pictures))
                shown = await asyncio.to_thread(self._seen, made)
            except ValueError as error:
                observation.append(f"{name} is not shown: {error}.")
                continue
            saved[name] = made.origin
            observation += [*self._named(self._add(made), made), shown]
        info = {key: value for key, value in {"error": cell.error, "saved": saved}.items() if value}
        return {"observation": observation, **info}

    async def release(self) -> None:  # type: ignore[override]
        super().release()
        await self._interpreter.release()

    async def healthy(self) -> bool:
        return await self._interpreter.healthy()

    async def close(self) -> None:
        await self._interpreter.close()


def _png(picture: Picture) -> bytes:
    file = BytesIO()
    picture.pixels().save(file, "PNG", compress_level=1)
    return file.getvalue()

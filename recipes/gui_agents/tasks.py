"""Data: pages for a browser, and screenshots with an element to click."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from agentfactory.tools.images.decode import size_of
from agentfactory.worlds.screens.sites import screens_tasks as pages

__all__ = ["gui_r1", "pages", "screen_spot", "screen_spot_pro"]


def gui_r1(limit: int, path: str = "ritzzai/GUI-R1", file: str = "train.parquet") -> Iterator[dict[str, Any]]:
    """Yield the first `limit` clicks of GUI-R1's training data (Luo et al., 2025, arXiv:2504.10458): the tasks of one
    step (`task_type: low`) that have a box, not only a point.

    Args:
        limit: Number of clicks; their images stay in memory.
        path: A hub data set with these columns; boxes are shares of the image's sides, from 0 to 1.
        file: Its file.

    Raises:
        ValueError: it has no such clicks.
    """
    import datasets

    rows = _undecoded(datasets.load_dataset(path, data_files=[file], split="train", streaming=True))
    count = 0
    for row in islice(filter(_is_click, rows), limit):
        count += 1
        yield _row(row, _pixels(row["gt_bbox"], row["image"]))
    if not count:
        raise ValueError(f"{path} has no clicks in {file}: rows with gt_action click, and a gt_bbox of four shares")


def screen_spot(path: str = "rootsautomation/ScreenSpot") -> Iterator[dict[str, Any]]:
    """Yield ScreenSpot (Cheng et al., 2024, arXiv:2401.10935): 1,272 elements of phones, desktops and the web.

    Args:
        path: A hub data set with these columns; boxes are shares of the image's sides, from 0 to 1.
    """
    import datasets

    for row in _undecoded(datasets.load_dataset(path, split="test")):
        source = f"{row['data_source']} {row['data_type']}"
        yield _row(row, _pixels(row["bbox"], row["image"])) | {"data_source": source}


def screen_spot_pro(path: str = "lmms-lab/ScreenSpot-Pro") -> Iterator[dict[str, Any]]:
    """Yield ScreenSpot-Pro (Li et al., 2025, arXiv:2504.07981): 1,581 elements of professional programs in high
    resolution.

    Args:
        path: A hub data set with these columns; boxes are in pixels.
    """
    import datasets

    for row in _undecoded(datasets.load_dataset(path, split="train")):
        yield _row(row, [float(edge) for edge in row["bbox"]]) | {"data_source": f"{row['group']} {row['ui_type']}"}


def _row(row: dict[str, Any], box: list[float]) -> dict[str, Any]:
    return {"question": row["instruction"], "images": [row["image"]], "box": box}


def _is_click(row: dict[str, Any]) -> bool:
    box = row["gt_bbox"] or ()
    is_box = len(box) == 4 and 0 <= box[0] < box[2] <= 1 and 0 <= box[1] < box[3] <= 1
    return is_box and row["gt_action"].lower() == "click" and row["task_type"] != "high"


def _pixels(shares: list[float], image: Any) -> list[float]:
    """Convert a box from shares of an image's sides to pixels."""
    width, height = size_of(image)
    return [share * side for share, side in zip(shares, (width, height, width, height), strict=True)]


def _undecoded(rows: Any) -> Any:
    """Return the data set with its images as undecoded files."""
    import datasets

    return rows.cast_column("image", datasets.Image(decode=False))

"""Files of groups, as they are written now and as version 0.1 wrote them."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from agentfactory.rollout.groups.group_files import append_group, delete_groups
from agentfactory.rollout.trajectory import Group


def write_groups(path: Path, groups: Iterable[Group]) -> None:
    """Write a file of groups in place of the one that is there."""
    delete_groups(path)
    path.touch()
    for group in groups:
        append_group(path, group)


def old_line(group: Group) -> str:
    """The line of a group as version 0.1 wrote it, with everything in JSON."""
    return json.dumps(asdict(group), ensure_ascii=False, default=_numbers)


def _numbers(stream: np.ndarray) -> list[float]:
    return stream.astype(int if stream.dtype == bool else stream.dtype).tolist()

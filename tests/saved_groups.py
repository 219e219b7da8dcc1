"""Group files in the current format and in version 0.1's."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from agentfactory.rollout.groups.group_files import append_group, delete_groups
from agentfactory.rollout.trajectory import Group


def write_groups(path: Path, groups: Iterable[Group]) -> None:
    """Write a group file, replacing an existing one."""
    delete_groups(path)
    path.touch()
    for group in groups:
        append_group(path, group)


def old_line(group: Group) -> str:
    """A group's line in version 0.1's format, with everything in JSON."""

    def numbers(stream: np.ndarray) -> list[float]:
        return stream.astype(int if stream.dtype == bool else stream.dtype).tolist()

    return json.dumps(asdict(group), ensure_ascii=False, default=numbers)

"""Reports of `audit` and `replay`, kept in the run's folder for the viewer."""

import json
import os
from pathlib import Path
from typing import Any

from agentfactory.base.files.disk import append, write_whole
from agentfactory.base.files.untrusted_files import lines_of, open_file, read_json

AUDIT = "audit.json"
REPLAYS = "replays.jsonl"
MOST_REPLAYS, SHOWN_REPLAYS = 10_000, 50
"""Lines that are read, and replays of a chain that are shown: the last ones."""


def save_audit(folder: Path, report: dict[str, Any]) -> bool:
    """Write the report of an audit; return whether the folder can be written."""
    if not os.access(folder, os.W_OK) or (folder / AUDIT).is_dir():
        return False
    write_whole(folder / AUDIT, f"{json.dumps(report, ensure_ascii=False, indent=1)}\n".encode("utf-8", "replace"))
    return True


def read_audit(folder: Path, within: Path) -> dict[str, Any] | None:
    """Return the report of the last audit; None if there is none. Raises OSError or ValueError if it cannot be read."""
    try:
        return read_json(folder / AUDIT, within)
    except FileNotFoundError:
        return None


def save_replay(folder: Path, replay: dict[str, Any]) -> bool:
    """Append the results of a replay; return whether the folder can be written."""
    if not os.access(folder, os.W_OK):
        return False
    append(folder / REPLAYS, f"{json.dumps(replay, ensure_ascii=False)}\n")
    return True


def read_replays(folder: Path, within: Path, chain: str) -> list[dict[str, Any]]:
    """Return the replays of a chain, in their order. Raises OSError or ValueError if they cannot be read."""
    try:
        with open_file(folder / REPLAYS, within) as file:
            found = [json.loads(line) for _, line in zip(range(MOST_REPLAYS), lines_of(file), strict=False)]
    except FileNotFoundError:
        return []
    known = [one for one in found if isinstance(one, dict) and one.get("chain") == chain]
    return [one for one in known if _is_replay(one)][-SHOWN_REPLAYS:]


def _is_replay(found: dict[str, Any]) -> bool:
    """Return whether a line has the form of a ranking, or of results."""
    turns, results = found.get("turns"), found.get("results")
    if isinstance(turns, list):
        return all(isinstance(one, dict) and _are_numbers(one.get("turn"), one.get("effect")) for one in turns)
    return isinstance(results, dict) and all(
        isinstance(one, dict) and _are_numbers(one.get("mean"), *(one.get("interval") or []))
        for one in results.values()
    )


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) for value in values)

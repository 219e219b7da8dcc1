"""The data of a chain's page: messages with separate images, and rows of tokens with all recorded values."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentfactory.audit.reports import REPLAYS, read_replays
from agentfactory.base.files.untrusted_files import open_file
from agentfactory.rollout.trajectory import Activity, Stretch
from agentfactory.viewer.runs.chain_index import Line, source_of
from agentfactory.viewer.runs.follower import Follower
from agentfactory.viewer.runs.run_data import Run
from agentfactory.viewer.runs.saved_groups import calls_of, read_group, read_line
from agentfactory.viewer.trajectories.image_marks import Marks, image_url, marks_of, read_image
from agentfactory.viewer.trajectories.token_texts import token_texts

_CREDITED = ("advantage", "proximal", "divergence")

Place = Callable[[int, int, str], str]
"""(message, part, address in the message) -> the URL under which a page shows this image."""


class NotThere(Exception):
    """The requested data is not in the runs; the message names it."""


@dataclass(frozen=True)
class Chain:
    """One chain of a group, with its location."""

    run: Run
    line: Line
    group: dict[str, Any]
    place: int
    rows_problem: str | None
    """The reason why the group's rows cannot be read; None if they can."""

    @property
    def saved(self) -> dict[str, Any]:
        return self.group["trajectories"][self.place]


def find_chain(follower: Follower, run_id: str, file: str, byte: int, place: int) -> Chain:
    """Return the chain at `place` in the group at the line that begins at `byte`. Raises NotThere."""
    run, line = follower.run(run_id), follower.index.line(run_id, file, byte)
    if run is None or line is None:
        raise NotThere("no such trajectory: the run's files may have been cut since, or have not been read that far")
    try:
        folder = run.folder
        with open_file(folder.trajectories / line.file, folder.within) as lines:
            inode = os.fstat(lines.fileno()).st_ino
        group, problem = _read_group(folder.trajectories / line.file, folder.within, line, inode)
    except (OSError, ValueError, LookupError, TypeError):
        raise NotThere(f"{file} has changed since: reload the page") from None
    if not 0 <= place < len(group["trajectories"]):
        raise NotThere(f"the group has {len(group['trajectories'])} chains, and none at place {place}")
    return Chain(run, line, group, place, problem)


@lru_cache(maxsize=2)
def _read_group(path: Path, within: Path, line: Line, inode: int) -> tuple[dict[str, Any], str | None]:
    # a page with many images requests its group once per image
    return read_group(path, line.byte, line.length, within)


def page_of(follower: Follower, chain: Chain, image: Place) -> dict[str, Any]:
    """Return everything about a chain; `image` returns the URL for each image. Raises NotThere if that fails."""
    try:
        return _page_of(follower, chain, image)
    except Exception as error:  # boundary: other users' files may hold anything
        problem = f"trajectory {chain.saved.get('id')}: {chain.line.file}, byte {chain.line.byte}"
        raise NotThere(f"{problem}: it cannot be shown: {error!r:.500}") from error


def _page_of(follower: Follower, chain: Chain, image: Place) -> dict[str, Any]:
    saved, line = chain.saved, chain.line
    members = follower.index.chains_of(line.run, line.file, line.byte)
    rows = [_row(row) for row in saved.get("rows") or []]
    texts = token_texts(chain.run)
    if texts is not None:
        for row in rows:
            row["texts"] = texts.texts(row["token_ids"])
    problem = _add_credit(rows, chain)
    return {
        "run": chain.run.id,
        "label": chain.run.label,
        "facts": members[chain.place],
        "group": [{name: member[name] for name in ("place", "chain", "reward", "outcome")} for member in members],
        "task": chain.group.get("task"),
        "messages": _messages(saved, image, marks_of(chain.run, saved["messages"], chain.group.get("source"))),
        "turn_rewards": saved.get("turn_rewards"),
        "timeline": _timeline(saved),
        "workspaces": saved.get("workspaces") or [],
        "metrics": saved.get("metrics") or {},
        "replays": _replays(chain),
        "rows": rows,
        "rows_problem": chain.rows_problem,
        "tokenizer": texts is not None,
        "credit_problem": problem,
    }


def _replays(chain: Chain) -> list[dict[str, Any]]:
    try:
        return read_replays(chain.run.path, chain.run.folder.within, str(chain.saved.get("id")))
    except (OSError, ValueError) as error:
        chain.run.note(f"{REPLAYS}: {error}")
        return []


def image_of(chain: Chain, message: int, part: int) -> tuple[str, bytes]:
    """Return the kind and bytes of one image. Raises NotThere if no image may be shown there."""
    try:
        url = image_url(chain.saved["messages"][message]["content"][part])
    except (LookupError, TypeError):
        url = None
    if url is None:
        raise NotThere("no such image")
    try:
        return read_image(chain.run, url)
    except ValueError as error:
        raise NotThere(str(error)) from None


def _messages(saved: dict[str, Any], image: Place, marks: Marks) -> list[dict[str, Any]]:
    messages = saved["messages"]
    spoken = sum(message.get("role") == "assistant" for message in messages)
    # a task may begin with assistant turns that were not sampled
    turn = saved.get("turns", spoken) - spoken
    shown = []
    for number, message in enumerate(messages):
        role = message.get("role")
        one = {
            "role": role,
            "name": message.get("name") or message.get("speaker"),
            "parts": _parts(message.get("content"), number, image, marks),
            "reasoning": message.get("reasoning_content"),
            "calls": [
                {"name": name, "arguments": arguments, "places": marks.places.get((number, place), [])}
                for place, (name, arguments) in enumerate(calls_of(message))
            ],
            "info": message.get("info"),
        }
        if role == "assistant":
            one["turn"] = turn
            turn += 1
        shown.append(one)
    return shown


def _parts(content: Any, message: int, image: Place, marks: Marks) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
        return [{"text": text}] if text else []
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        if part.get("type") == "text":
            parts.append({"text": str(part.get("text", ""))})
            continue
        if url := image_url(part):
            parts.append({"image": image(message, number, url), "boxes": marks.boxes.get((message, number), [])})
        else:
            shown = part.get("image_url")
            shown = str(shown.get("url") if isinstance(shown, dict) else shown)
            parts.append({"text": f"[{part.get('type')} not shown: {shown[:200]}{'...' if len(shown) > 200 else ''}]"})
    return parts


def _timeline(saved: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the intervals to draw; None if the chain was saved before they were recorded."""
    stretches = saved.get("timeline")
    if not isinstance(stretches, list):
        return None
    drawn = []
    for stretch in stretches:
        try:
            made = Stretch(**{**stretch, "activity": Activity(stretch["activity"])})
            if 0 <= made.start <= made.end < math.inf and (made.turn is None or type(made.turn) is int):
                drawn.append({**asdict(made), "name": str(made.name)})
        except (TypeError, ValueError, KeyError):
            continue  # of another version, or edited
    return drawn


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row's streams, and for each token the index of its version in `versions`, or -1."""
    spans = row.get("versions") or []
    names: dict[tuple[str, bool], int] = {}
    version = [-1] * len(row["token_ids"])
    for span in spans:
        number = names.setdefault((str(span["version"]), bool(span.get("mixed"))), len(names))
        start, end = (min(max(span[edge], 0), len(version)) for edge in ("start", "end"))
        version[start:end] = [number] * (end - start)
    return {
        "token_ids": row["token_ids"].tolist(),
        "mask": row["mask"].astype(int).tolist(),
        "logprobs": row["logprobs"].tolist(),
        "version": version,
        "versions": [{"version": name, "mixed": mixed} for name, mixed in names],
        "turn_ends": row.get("turn_ends") or [],
    }


def _add_credit(rows: list[dict[str, Any]], chain: Chain) -> str | None:
    """Give each row the streams _CREDITED that the trainer has saved for it, with None for tokens without a value."""
    place = chain.run.credit.get(str(chain.group["id"])) if source_of(chain.line.file) == "train" else None
    if place is None:
        return None
    path = chain.run.credit_file.path
    try:
        saved = read_line(path, place.offset, place.length, chain.run.folder.within)["chains"].get(
            chain.saved["id"], []
        )
        streams = [
            (entry["row"], name, _stream(rows[entry["row"]], entry, name)) for entry in saved for name in _CREDITED
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"The data in {path.name} does not fit this trajectory: {error!r}"
    for row, name, stream in streams:
        if stream is not None:
            rows[row][name] = stream
    return None


def _stream(row: dict[str, Any], entry: dict[str, Any], name: str) -> list[float | None] | None:
    if entry.get(name) is None:
        return None
    stream: list[float | None] = [None] * len(row["token_ids"])
    for position, value in zip(entry["targets"], entry[name], strict=True):
        stream[position] = value
    return stream

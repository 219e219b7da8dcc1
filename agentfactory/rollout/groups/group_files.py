"""Group files: one readable JSON line per group, and a second file with the arrays of its rows. A line of `train.jsonl`
has everything except the streams of the rows (STREAMS); each stream is replaced by its number of values. The values are
in `train.arrays`, a concatenation of one safetensors record per group. A record has an array per stream, with the
values of all rows of the group in order; readers ignore unknown names. The line's `arrays` gives the `offset` and
`length` of its record in bytes and its `crc32`, so a group can be read alone. Lines of version 0.1 and handwritten
lines contain the streams as lists; they can be read as well."""

import json
import math
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from pydantic_core import from_json
from safetensors import SafetensorError
from safetensors.numpy import load, save

from agentfactory.base.files.disk import append
from agentfactory.base.files.untrusted_files import lines_of, open_file
from agentfactory.rollout.trajectory import Group

STREAMS: dict[str, tuple[Any, np.dtype[Any]]] = {
    "token_ids": (list[int], np.dtype(np.int32)),
    "mask": (list[int], np.dtype(np.bool_)),
    "logprobs": (list[float], np.dtype(np.float32)),
    "weights": (list[float], np.dtype(np.float64)),
    "roles": (str, np.dtype(np.uint8)),
    "teacher_logprobs": (list[float], np.dtype(np.float32)),
    "teacher_tokens": (list[int], np.dtype(np.int32)),
    "teacher_prompt": (list[int], np.dtype(np.int32)),
}
"""Stream of a row -> its type if a line contains it, and the type of its array. Roles are ASCII letters."""

_RECORD_BYTES = 1 << 30
"""Maximum size of a group's arrays; 64 chains of 100,000 tokens have an eighth of that, with top_k grades more."""

UNFINISHED = "unfinished"
"""Folder, beside saved groups, of those that a signal cut short."""
CREDIT_FILE = "credit.jsonl"
"""Name of the file, in a folder of trajectories, with the trainer's values per token. It contains no groups."""


@dataclass(frozen=True)
class EncodedGroup:
    """A group as in its files: its line, and the record of its arrays (empty if no row has values)."""

    line: bytes
    record: bytes


@dataclass(frozen=True)
class Delivered:
    """A group in delivery to the trainer: its bytes, as saved, and the ids of the chains that count."""

    group: EncodedGroup
    chains: list[str]


def train_file(worker: int) -> str:
    """Return the name of the file for the trained groups of worker number `worker`, from 0."""
    return f"train-{worker}.jsonl" if worker else "train.jsonl"


def train_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("train*.jsonl"))


def arrays_file(path: Path) -> Path:
    return path.with_suffix(".arrays")


def encode_group(group: Group, offset: int = 0) -> EncodedGroup:
    """Encode a group whose record will start at byte `offset` of its file."""
    chains = []
    streams: dict[str, list[np.ndarray]] = {name: [] for name in STREAMS}
    for chain in group.trajectories:
        rows = []
        for row in chain.rows:
            fields = dict(vars(row))
            for name in STREAMS:
                if fields[name] is not None:
                    streams[name].append(_array(name, fields[name]))
                    fields[name] = len(fields[name])
            rows.append(fields)
        chains.append({**vars(chain), "rows": rows})
    line = {**vars(group), "trajectories": chains}
    if group.judged is None:
        line.pop("judged", None)
    arrays = {name: np.concatenate(parts) for name, parts in streams.items() if any(map(len, parts))}
    record = save(arrays) if arrays else b""
    if record:
        line["arrays"] = {"offset": offset, "length": len(record), "crc32": zlib.crc32(record)}
    return EncodedGroup(_json(line), record)


def _json(line: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(line, enc_hook=_plain)
    except UnicodeEncodeError:
        # replace lone surrogates in an agent's text, which JSON escapes can express but UTF-8 cannot
        text = json.dumps(msgspec.to_builtins(line, enc_hook=_plain), ensure_ascii=False).encode("utf-8", "replace")
        return msgspec.json.encode(from_json(text))


def decode_group(line: bytes, record: bytes) -> Group:
    """Return the group of a line and its record, with arrays as streams. Raise ValueError if they are no group."""
    saved = from_json(line)
    restore_streams(saved, record)
    return _group(saved)


def append_group(path: Path, group: Group) -> EncodedGroup:
    """Append a group to `path` and its arrays file, which only this process may write. Raise DiskError."""
    arrays = arrays_file(path)
    encoded = encode_group(group, arrays.stat().st_size if arrays.exists() else 0)
    # the line comes last, so that a reader of the line finds its arrays
    if encoded.record:
        append(arrays, encoded.record)
    append(path, encoded.line + b"\n")
    return encoded


def keep_unfinished(path: Path, group: Group) -> None:
    """Save what the chains of a group that will not end have sampled, apart from `path` and what reads its folder."""
    if any(chain.turns for chain in group.trajectories):
        folder = path.parent / UNFINISHED
        folder.mkdir(exist_ok=True)
        append_group(folder / path.name, group)


def delete_groups(path: Path) -> None:
    for file in (path, arrays_file(path)):
        file.unlink(missing_ok=True)


def read_groups(path: str | Path) -> Iterator[Group]:
    """Yield the groups of a trajectories file, or of all `*.jsonl` files of a folder except CREDIT_FILE. Raise
    ValueError with file and line for damage, and OSError if a file cannot be read or is a link in a folder."""
    path = Path(path)
    within = path if path.is_dir() else None
    files = [path] if within is None else [file for file in sorted(path.glob("*.jsonl")) if file.name != CREDIT_FILE]
    for file in files:
        with open_file(file, within) as content:
            number, lines = 0, lines_of(content)
            while True:
                number += 1
                try:
                    if (line := next(lines, None)) is None:
                        break
                    saved = from_json(line)
                    restore_streams(saved, read_record(saved, file, within))
                    group = _group(saved)
                except ValueError as error:
                    raise ValueError(f"{file}:{number} is not a saved group: {error}") from error
                yield group


def read_record(saved: Any, path: Path, within: Path | None = None) -> bytes:
    """Return the record of a parsed line of the file `path`; empty if the line has none. Links below the folder
    `within` are not followed. Raise ValueError with a fix if the arrays file cannot be read or is too short."""
    place = saved.get("arrays") if isinstance(saved, dict) else None
    if place is None:
        return b""
    arrays = arrays_file(path)
    try:
        start, length = int(place["offset"]), int(place["length"])
        if min(start, length) < 0:
            raise ValueError(f"its arrays begin at byte {start} and have {length} bytes")
        with open_file(arrays, within) as file:
            # a damaged line may give a length that does not fit in memory
            if start + length > (size := file.seek(0, os.SEEK_END)):
                problem = f"its arrays end at byte {start + length} of {arrays.name}, which has only {size}"
                raise ValueError(f"{problem}; fix: copy the whole file, or remove the line")
            if length > _RECORD_BYTES:
                raise ValueError(f"its arrays have more than {_RECORD_BYTES:,} bytes; fix: remove the line")
            file.seek(start)
            return file.read(length)
    except OSError as error:
        problem = f"its arrays file {arrays.name} cannot be read: {error.strerror}"
        raise ValueError(f"{problem}; fix: put that file beside {path.name}") from error
    except (LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"not a saved group: {error!r}") from error


def restore_streams(saved: Any, record: bytes) -> None:
    """Replace the counts, or lists, in the rows of a parsed line by arrays. Raise ValueError if they are no group."""
    try:
        place = saved.pop("arrays", None)
        if place is not None and zlib.crc32(record) != place["crc32"]:
            raise ValueError("its arrays are damaged, or belong to another file; fix: copy both files, unchanged")
        arrays = load(record) if place is not None else {}
        taken: Counter[str] = Counter()
        for row in (row for chain in saved["trajectories"] for row in chain.get("rows", ())):
            for name, (_, kind) in STREAMS.items():
                value = row.get(name)
                if type(value) is int:
                    start, taken[name] = taken[name], taken[name] + value
                    row[name] = arrays.get(name, np.empty(0, kind))[start : taken[name]]
                elif value is not None:
                    row[name] = _listed(name, value)
            if "roles" in row:
                row["roles"] = row["roles"].tobytes().decode("ascii")
    except (AttributeError, LookupError, TypeError, SafetensorError) as error:
        raise ValueError(f"not a saved group: {error!r}") from error
    for name, count in taken.items():
        if count != (held := len(arrays.get(name, ()))):
            problem = f"its rows have {count} {name}, but their array has {held}"
            raise ValueError(f"{problem}; fix: remove whole lines, not chains of a line")


def _array(name: str, values: Any) -> np.ndarray:
    kind = STREAMS[name][1]
    if isinstance(values, np.ndarray):
        return values.astype(kind, copy=False)
    if isinstance(values, str):
        return np.frombuffer(values.encode("ascii"), kind)
    # several times faster than numpy's conversion of a list
    return np.frombuffer(struct.pack(f"{len(values)}{kind.char}", *values), kind)


def _listed(name: str, values: Any) -> np.ndarray:
    try:
        return _array(name, msgspec.convert(values, STREAMS[name][0]))
    except (msgspec.ValidationError, struct.error, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from error


def _group(saved: Any) -> Group:
    group = msgspec.convert(saved, Group)
    for chain in group.trajectories:
        for reward in (chain.reward, *(chain.turn_rewards or [])):
            # Python's JSON can contain NaN and Infinity
            if reward is not None and not math.isfinite(reward):
                raise ValueError(f"chain {chain.id} has the reward {reward!r}, which is not finite")
        try:
            for row in chain.rows:
                row.check_logprobs()
        except ValueError as error:
            raise ValueError(f"chain {chain.id}: {error}") from None
        if chain.anchors and len(chain.anchors) != chain.turns:
            raise ValueError(f"chain {chain.id} has {chain.turns} turns and {len(chain.anchors)} anchors")
    return group


def _plain(value: Any) -> Any:
    """Convert a number or text of a subclass, such as numpy's, to the built-in type."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a saved group cannot contain {value!r}, a {type(value).__name__}")

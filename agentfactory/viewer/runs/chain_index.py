"""The index of all saved chains: the fields that a list shows and filters by, and each chain's location in its file."""

import math
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentfactory.base.messages import CallError
from agentfactory.viewer.runs.query import Query
from agentfactory.viewer.runs.saved_groups import calls_of, outline, task_text

_PREVIEW = 240
_FACETS = 200
_BINS = 20
_FAR = 1e300
"""Larger rewards, such as infinity, are left out of histograms."""

_SCHEMA = """
CREATE TABLE chains (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT, file TEXT, source TEXT, byte INTEGER, length INTEGER,
    place INTEGER, group_id TEXT, chain TEXT, version INTEGER, step INTEGER, outcome TEXT, stop TEXT, reward REAL,
    success REAL, turns INTEGER, calls INTEGER, errors INTEGER, tokens INTEGER, sampled INTEGER, seconds REAL,
    error TEXT, preview TEXT, tasks TEXT
);
CREATE INDEX by_line ON chains (run, file, byte);
CREATE INDEX by_group ON chains (run, group_id);
CREATE TABLE used (chain INTEGER, tool TEXT);
CREATE INDEX by_tool ON used (tool, chain);
CREATE INDEX by_chain ON used (chain);
CREATE TABLE found (search INTEGER, chain INTEGER, PRIMARY KEY (search, chain)) WITHOUT ROWID;
"""

_COLUMNS = (
    "run, file, source, byte, length, place, group_id, chain, version, step, outcome, stop, reward, success, turns, "
    "calls, errors, tokens, sampled, seconds, error, preview, tasks"
)
_LISTED = "id, " + _COLUMNS.replace("length, ", "")
# in the order of the columns, without `id`
_INSERT = f"INSERT INTO chains ({_COLUMNS}) VALUES ({', '.join('?' * 23)})"

# ordered in the outer query, where `reward` is the mean
_GROUPED = """
SELECT * FROM (
    SELECT max(id) AS id, run, file, source, byte, group_id, version, step, count(*) AS chains, avg(reward) AS reward,
        min(reward) AS lowest, max(reward) AS highest, avg(success) AS success, avg(turns) AS turns,
        avg(calls) AS calls, sum(reward IS NULL) AS unscored, preview
    FROM chains {where} GROUP BY run, file, byte
) ORDER BY {order} LIMIT ? OFFSET ?
"""


@dataclass(frozen=True)
class Line:
    """The location of a group. `last` is the id of its last chain."""

    run: str
    file: str
    byte: int
    length: int
    last: int


def source_of(file: str) -> str:
    """Return the kind of a trajectories file, from its path: `train`, `rollout`, `eval sampled`, `eval greedy`."""
    stem = file.removesuffix(".jsonl").removeprefix("eval/")
    kind, _, mode = stem.rpartition("-")
    if kind == "train" and mode.isdecimal():
        return kind  # of a further worker
    return f"eval {mode}" if mode in ("sampled", "greedy") else stem


def has_run_version(file: str) -> bool:
    """Return whether only the run knows the version of the weights of a file's chains, as for `eval` and `rollout`."""
    source = source_of(file)
    return source == "rollout" or (source.startswith("eval ") and _numbered(file) is None)


def _numbered(file: str) -> int | None:
    number = file.rpartition("/")[2].partition("-")[0]
    return int(number) if number.isdecimal() else None


def rows_of(run: str, file: str, byte: int, line: bytes) -> list[tuple[tuple[Any, ...], set[str]]]:
    """Return a row of the index per chain of a line, with the tools that it called. Raises ValueError at no group."""
    group = outline(line)
    try:
        group["task"]  # must exist, because text search reads it
        task = (task_text(group)[:_PREVIEW], _text(group.get("source") or None))
        source = source_of(file)
        # that of the newest weights when the group began
        version = _numbered(file) if source.startswith("eval ") else int(group.get("version", 0))
        place_in_file = (run, file, source, byte, len(line))
        return [
            _row(place_in_file, place, str(group["id"]), version, chain, task)
            for place, chain in enumerate(group["trajectories"])
        ]
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a saved group: {error!r}") from error


def _row(
    where: tuple[Any, ...], place: int, group: str, version: int | None, chain: dict[str, Any], task: tuple[Any, ...]
) -> tuple[tuple[Any, ...], set[str]]:
    names = [name for message in chain["messages"] for name, _ in calls_of(message)]
    metrics, rows = chain.get("metrics") or {}, chain.get("rows") or []
    # `outline` has replaced the token streams that it recognizes with counts
    tokens = sum(row["token_ids"] if isinstance(row["token_ids"], int) else len(row["token_ids"]) for row in rows)
    errors = sum(metrics.get(f"tool_errors/{kind}", 0) for kind in CallError)
    figures = (
        str(chain["outcome"]),
        _text(chain.get("stop_reason")),
        _number(chain.get("reward")),
        _number(metrics.get("success")),
        float(chain.get("turns", 0)),
        float(metrics.get("tool_calls", len(names))),
        float(errors),
        tokens,
        _number(metrics.get("sampled_tokens")),
        float(chain.get("seconds", 0.0)),
        _text(chain.get("error")),
    )
    return (*where, place, group, str(chain["id"]), version, None, *figures, *task), set(names)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _where(query: Query, search: int | None) -> tuple[str, list[Any]]:
    """Return a query's condition, restricted to the matches of a text search (None: not restricted), and its values."""
    where, values = query.where()
    if search is not None:
        where += " AND id IN (SELECT chain FROM found WHERE search = ?)"
        values.append(search)
    return where, values


def _bin_width(lowest: float, highest: float) -> float:
    """Return a round width, of which about 20 cover the range; 0 if there is only one value."""
    if lowest == highest:
        return 0.0
    rough = max((highest - lowest) / _BINS, max(abs(lowest), abs(highest)) * 1e-12)
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= rough * (1 - 1e-9)), 10 * power)


class Index:
    """An in-memory index, safe to use from several threads."""

    def __init__(self) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.executescript(_SCHEMA)
        self._database.row_factory = sqlite3.Row
        self._lock = threading.Lock()

    def add(self, rows: Sequence[tuple[tuple[Any, ...], set[str]]]) -> None:
        """Add rows from `rows_of`, all or none. Raises OverflowError if a number is too large."""
        with self._lock, self._database:
            for row, tools in rows:
                chain = self._database.execute(_INSERT, row).lastrowid
                self._database.executemany("INSERT INTO used VALUES (?, ?)", [(chain, tool) for tool in tools])

    def forget(self, run: str, file: str) -> None:
        with self._lock, self._database:
            chains = "(SELECT id FROM chains WHERE run = ? AND file = ?)"
            self._database.execute(f"DELETE FROM used WHERE chain IN {chains}", (run, file))
            self._database.execute(f"DELETE FROM found WHERE chain IN {chains}", (run, file))
            self._database.execute("DELETE FROM chains WHERE run = ? AND file = ?", (run, file))

    def note_steps(self, run: str, steps: Sequence[tuple[str, int]]) -> None:
        with self._lock, self._database:
            self._database.executemany(
                "UPDATE chains SET step = ? WHERE run = ? AND group_id = ? AND source = 'train'",
                [(step, run, group) for group, step in steps],
            )

    def note_version(self, run: str, file: str, version: int) -> None:
        with self._lock, self._database:
            self._database.execute("UPDATE chains SET version = ? WHERE run = ? AND file = ?", (version, run, file))

    def counts(self) -> dict[str, int]:
        return {
            row["run"]: row["count"] for row in self._read("SELECT run, count(*) AS count FROM chains GROUP BY run")
        }

    def page(self, query: Query, search: int | None) -> dict[str, Any]:
        """Return one page of the chains (or groups) that match a query, and their total number. `search` is the number
        of a text search, which restricts the result to its matches; None: no restriction."""
        where, values = _where(query, search)
        limits = (query.size, query.size * query.page)
        if query.by_group:
            total = f"SELECT count(*) AS total FROM (SELECT 1 FROM chains {where} GROUP BY run, file, byte)"
            rows = self._read(_GROUPED.format(where=where, order=query.order()), (*values, *limits))
        else:
            total = f"SELECT count(*) AS total FROM chains {where}"
            wanted = f"SELECT {_LISTED} FROM chains {where} ORDER BY {query.order()} LIMIT ? OFFSET ?"
            rows = self._read(wanted, (*values, *limits))
        found = [dict(row) for row in rows]
        for row in found:
            chain = row.pop("id")
            if not query.by_group:
                row["tools"] = self._tools(chain)
        return {"total": self._read(total, values)[0]["total"], "rows": found}

    def rewards(self, query: Query, search: int | None) -> dict[str, Any]:
        """Return the reward distribution of the chains that match a query. `bins` has per bin and run its beginning
        `from`, the lowest and the highest reward in it, and the number of `chains`; all bins have the same `width` (0:
        all rewards are equal). `steps` has the first and last step of the chains in any step, and the nearest steps
        before and after the requested ones; `by` is its unit: steps, or versions if no step is known."""
        where, values = _where(query, search)
        finite = f"{where} AND abs(reward) < {_FAR}"
        (told,) = self._read(
            f"SELECT count(*) AS scored, avg(reward) AS mean, min(reward) AS lowest, max(reward) AS highest "
            f"FROM chains {finite}",
            values,
        )
        chains = self._read(f"SELECT count(*) AS chains FROM chains {where}", values)[0]["chains"]
        width, bins = 0.0, []
        if told["scored"]:
            width = _bin_width(told["lowest"], told["highest"])
            first = math.floor(told["lowest"] / width + 1e-9) if width else 0
            # the highest reward falls into the last bin, instead of beginning another one
            last = math.ceil(told["highest"] / width - first - 1e-9) - 1 if width else 0
            place = f"MIN(CAST(reward / {width!r} - {first} + 1e-9 AS INTEGER), {last})" if width else "0"
            counted = (
                f"SELECT run, {place} AS bin, count(*) AS chains, min(reward) AS lowest, max(reward) AS highest "
                f"FROM chains {finite} GROUP BY bin, run ORDER BY bin, run"
            )
            for row in self._read(counted, values):
                told_of_bin = {name: row[name] for name in ("run", "lowest", "highest", "chains")}
                bins.append({**told_of_bin, "from": (first + row["bin"]) * width if width else row["lowest"]})
        by, steps = self._steps(query, search)
        found = {"chains": chains, "scored": told["scored"], "mean": told["mean"], "width": width, "bins": bins}
        return {"by": by, "steps": steps, **found}

    def _steps(self, query: Query, search: int | None) -> tuple[str, dict[str, int | None]]:
        for by in ("step", "version"):
            low, high = query.ranges.get(by, (-math.inf, math.inf))
            ranges = {name: bounds for name, bounds in query.ranges.items() if name not in (by, "reward")}
            where, values = _where(replace(query, ranges=ranges), search)
            (row,) = self._read(
                f"SELECT min({by}) AS first, max({by}) AS last, max(CASE WHEN {by} < ? THEN {by} END) AS before, "
                f"min(CASE WHEN {by} > ? THEN {by} END) AS after FROM chains {where}",
                (low, high, *values),
            )
            if row["first"] is not None:
                break
        return by, dict(row)

    def _tools(self, chain: int) -> list[str]:
        return [row["tool"] for row in self._read("SELECT tool FROM used WHERE chain = ? ORDER BY tool", (chain,))]

    def facets(self) -> dict[str, dict[str, int]]:
        """Return the values of `outcome`, `source`, `tasks`, `success` and `tool`, with their numbers of chains."""
        succeeded = "CASE WHEN success >= 1 THEN 'yes' WHEN success < 1 THEN 'no' END"
        kinds = {
            **{kind: (kind, "chains", "count DESC") for kind in ("outcome", "source")},
            **{"tasks": ("tasks", "chains", "name"), "success": (succeeded, "chains", "name")},
            "tool": ("tool", "used", "count DESC"),
        }
        found = {}
        for kind, (value, table, order) in kinds.items():
            counted = f"SELECT {value} AS name, count(*) AS count FROM {table} WHERE {value} IS NOT NULL GROUP BY name"
            rows = self._read(f"{counted} ORDER BY {order} LIMIT ?", (_FACETS,))
            found[kind] = {row["name"]: row["count"] for row in rows}
        return found

    def line(self, run: str, file: str, byte: int) -> Line | None:
        """Return the line that begins at `byte`; None if it was not read."""
        for row in self._read(
            "SELECT max(length) AS length, max(id) AS last FROM chains WHERE run = ? AND file = ? AND byte = ?",
            (run, file, byte),
        ):
            if row["length"] is not None:
                return Line(run, file, byte, row["length"], row["last"])
        return None

    def place_of(self, run: str, chain: str, group: str) -> dict[str, Any] | None:
        """Return the file, byte and place of a chain, or of the first chain of a group; None if it was not read."""
        name, value = ("chain", chain) if chain else ("group_id", group)
        wanted = (
            f"SELECT run, file, byte, place FROM chains WHERE run = ? AND {name} = ? ORDER BY place, id DESC LIMIT 1"
        )
        return next((dict(row) for row in self._read(wanted, (run, value))), None) if value else None

    def chains_of(self, run: str, file: str, byte: int) -> list[dict[str, Any]]:
        wanted = f"SELECT {_LISTED} FROM chains WHERE run = ? AND file = ? AND byte = ? ORDER BY place"
        return [dict(row) for row in self._read(wanted, (run, file, byte))]

    # ---- for text searches

    def lines_after(self, chain: int, most: int) -> list[Line]:
        """Return the next lines after a chain's, in the order of reading."""
        wanted = (
            "SELECT run, file, byte, max(length) AS length, max(id) AS last FROM "
            "(SELECT id, run, file, byte, length FROM chains WHERE id > ? ORDER BY id LIMIT ?) "
            "GROUP BY run, file, byte ORDER BY last"
        )
        rows = [Line(*row) for row in self._read(wanted, (chain, most))]
        # the last line may have more chains than the limit included
        return [*rows[:-1], self.line(rows[-1].run, rows[-1].file, rows[-1].byte) or rows[-1]] if rows else []

    def left_after(self, chain: int) -> int:
        return self._read("SELECT count(*) AS count FROM chains WHERE id > ?", (chain,))[0]["count"]

    def note_found(self, search: int, line: Line, places: Sequence[int]) -> None:
        wanted = (
            "INSERT OR IGNORE INTO found SELECT ?, id FROM chains WHERE run = ? AND file = ? AND byte = ? AND place = ?"
        )
        with self._lock, self._database:
            self._database.executemany(wanted, [(search, line.run, line.file, line.byte, place) for place in places])

    def drop_search(self, search: int) -> None:
        with self._lock, self._database:
            self._database.execute("DELETE FROM found WHERE search = ?", (search,))

    def _read(self, wanted: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        with self._lock:
            return self._database.execute(wanted, values).fetchall()

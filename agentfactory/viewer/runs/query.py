"""Queries of the list: checked filters, order and page, as parts of an SQL query."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_ROWS = 200
_MOST_PAGES = 10**9

_EXACT = {"run": "run", "source": "source", "tasks": "tasks", "outcome": "outcome", "group": "group_id"}
_SUCCESS = {"yes": "success >= 1", "no": "success < 1"}
"""Chains without `success` are in neither."""
_ORDERS = {
    "newest": "version IS NULL, version {0}, id {0}",
    **{
        name: f"{name} IS NULL, {name} {{0}}, id {{0}}"
        for name in ("reward", "success", "turns", "calls", "errors", "tokens", "seconds", "step")
    },
}


class BadQuery(ValueError):
    """A parameter is invalid; the message names it."""


@dataclass(frozen=True)
class Query:
    """One page of a list. Ranges include both ends, and leave out rows without a value."""

    exact: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    success: str = ""
    tool: str = ""
    text: str = ""
    sort: str = "newest"
    ascending: bool = False
    by_group: bool = False
    page: int = 0
    size: int = 50

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "Query":
        """Parse the parameters of a URL; unknown ones are ignored. Raises BadQuery."""
        ranges = {}
        for name in ("version", "step", "reward"):
            low, high = _number(given, f"{name}_min", -math.inf), _number(given, f"{name}_max", math.inf)
            if (low, high) != (-math.inf, math.inf):
                ranges[name] = (low, high)
        by_group = given.get("view") == "groups"
        sort = given.get("sort") or "newest"
        # a list of groups does not have these columns of chains
        if sort not in _ORDERS or (by_group and sort in ("errors", "tokens", "seconds")):
            raise BadQuery(f"sort: got {sort!r}; use one of {', '.join(_ORDERS)}")
        success = given.get("success", "")
        if success not in ("", *_SUCCESS):
            raise BadQuery(f"success: got {success!r}; use yes or no")
        return cls(
            exact={column: given[name] for name, column in _EXACT.items() if given.get(name)},
            ranges=ranges,
            success=success,
            tool=given.get("tool", ""),
            text=given.get("text", "").strip(),
            sort=sort,
            ascending=given.get("ascending") == "1",
            by_group=by_group,
            page=int(min(_MOST_PAGES, max(0, _number(given, "page", 0)))),
            size=int(min(MOST_ROWS, max(1, _number(given, "size", 50)))),
        )

    def where(self) -> tuple[str, list[Any]]:
        parts = ["1"]
        values: list[Any] = []
        for column, value in self.exact.items():
            parts.append(f"{column} = ?")
            values.append(value)
        for column, bounds in self.ranges.items():
            parts.append(f"{column} BETWEEN ? AND ?")
            values += bounds
        if self.success:
            parts.append(_SUCCESS[self.success])
        if self.tool:
            parts.append("id IN (SELECT chain FROM used WHERE tool = ?)")
            values.append(self.tool)
        return f"WHERE {' AND '.join(parts)}", values

    def order(self) -> str:
        return _ORDERS[self.sort].format("ASC" if self.ascending else "DESC")


def _number(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name, "").strip()
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        raise BadQuery(f"{name}: got {text!r}; use a number") from None
    if math.isnan(number):
        raise BadQuery(f"{name}: got {text!r}; use a number")
    return number

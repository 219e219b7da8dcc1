"""The metrics of a run by name, which is a fraction of the size of many lines, and of a browser's work on them."""

import math
from collections.abc import Sequence
from typing import Any


def series_of(lines: Sequence[dict[str, Any]], start: int) -> dict[str, Any]:
    """Return the metrics of `lines` from number `start` on.

    `from` is the number of the first line, `lines` the number after the last one. `series` has per name `y`, the finite
    numbers, and `at`, the numbers of their lines; without `at`, every line has the metric.
    """
    new = lines[start:]
    at: dict[str, list[int]] = {}
    y: dict[str, list[float]] = {}
    for number, line in enumerate(new, start):
        for name, value in line.items():
            if name not in y:
                at[name], y[name] = [], []
            if type(value) is int or (type(value) is float and math.isfinite(value)):
                at[name].append(number)
                y[name].append(value)
    series = {
        name: {"y": values} if len(values) == len(new) else {"at": at[name], "y": values} for name, values in y.items()
    }
    return {"from": start, "lines": start + len(new), "series": series}

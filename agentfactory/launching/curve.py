"""The learning curve of a run as a picture."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

_CURVES = ("reward", "success", "loss")
_EVALUATIONS = {"eval/sampled/success": "held-out success, sampled", "eval/greedy/success": "held-out success, greedy"}


def draw_curve(metrics: Iterable[dict[str, Any]], path: Path, title: str) -> Path | None:
    """Draw reward and success (of a run without them, the loss) over steps, with the held-out points, as a PNG.

    `metrics` are the lines of metrics.jsonl. Returns `path`; None where there is nothing to draw.
    """
    rows = [row for row in metrics if "step" in row]
    names = [name for name in _CURVES if any(name in row for row in rows)]
    if not names:
        return None
    # matplotlib takes most of a second to import, and only this needs it
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in names[:2] if names[0] != "loss" else names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.5)
    for name, label in _EVALUATIONS.items():
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), "o", label=label)
    axes.set(xlabel="step", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path

"""The end of a run: its results, its best checkpoint, and its learning curve as a PNG."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentfactory.base.user_code.extras import check_extra
from agentfactory.recipe.composition import display

_EVALUATIONS = {"eval/sampled/success": "held-out success, sampled", "eval/greedy/success": "held-out success, greedy"}


def draw_curve(metrics: Iterable[dict[str, Any]], path: Path, title: str) -> Path | None:
    """Draw reward and success, or the loss, as a PNG. Return `path`; None without steps. Raises SettingError."""
    rows = [row for row in metrics if "step" in row]
    names = [name for name in ("reward", "success", "loss") if any(name in row for row in rows)]
    if not names:
        return None
    check_extra("viewer")
    # its notices about a home that cannot be written do not concern the run
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    lines = {name: name for name in (names[:2] if names[0] != "loss" else names)}
    for name, label in {**lines, **_EVALUATIONS}.items():
        if points := [(row["step"], row[name]) for row in rows if name in row]:
            axes.plot(*zip(*points, strict=True), "-" if name in lines else "o", label=label, linewidth=1.5)
    axes.set(xlabel="step", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


def conclude(name: str, summary: dict[str, Any], folder: Path, curve: Path | None) -> list[str]:
    """Return the last lines that a run prints: its results, their location, and what to do next."""
    figures = {kind: [summary.get(f"{kind}_{when}") for when in ("before", "after")] for kind in ("success", "greedy")}
    results = [f"{kind} {a:.2f} -> {b:.2f}" for kind, (a, b) in figures.items() if a is not None and b is not None]
    if "steps" in summary:
        results.append(f"{summary['steps']} steps")
    if "train_wall_seconds" in summary:
        results.append(f"{summary['train_wall_seconds']:.0f} s of training")
    places = [f"checkpoint {display(folder / summary['checkpoint'])}"] if summary.get("checkpoint") else []
    places += best_checkpoint(summary, folder)
    places += [f"curve {display(curve)}"] if curve else []
    places.append(f"run folder {display(folder)}")
    lines = [f"{name}: " + "; ".join([*([", ".join(results)] if results else []), *places])]
    if (metric := _not_risen(summary)) is not None:
        lines.append(
            f"{metric} has not risen: if groups/equal_rewards is near 1, use easier tasks, a denser reward or a cold "
            "start; if chains fail or are cut (outcome/...), read their errors; more causes: docs/troubleshooting.md, "
            "'The run does not learn'"
        )
    return [*lines, f"look at it: agentfactory view {display(folder)}"]


class MostChainsDroppedError(Exception):
    """A complete run dropped most of its chains and learned from the few others. The message has the counts."""


def chains_dropped(metrics: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return the number of `chains` that ended and of `dropped_chains`; empty if there were none."""
    lines = [line for line in metrics if "chains" in line]
    if not lines:
        return {}
    kinds = {name for line in lines for name in line if name.startswith("filtered/")} - {"filtered/groups"}
    dropped = sum(line.get(name, 0) for line in lines for name in kinds)
    return {"chains": int(sum(line["chains"] for line in lines)), "dropped_chains": int(dropped)}


def check_dropped(summaries: Iterable[dict[str, Any]]) -> None:
    """Raise MostChainsDroppedError if a stage with one of these summaries has dropped more than half of its chains."""
    for summary in summaries:
        chains, dropped = summary.get("chains", 0), summary.get("dropped_chains", 0)
        if dropped > chains / 2:
            told = f"{dropped} of {chains} chains were dropped or run again (filtered/* in metrics.jsonl)"
            raise MostChainsDroppedError(told)


def best_checkpoint(summary: dict[str, Any], folder: Path) -> list[str]:
    """Describe the best checkpoint of a run, unless it is the last one, or none beats the initial weights."""
    best = summary.get("best_checkpoint")
    if not best or best["path"] == summary.get("checkpoint"):
        return []
    before = summary.get(f"{best['metric'].rpartition('/')[2]}_before")
    if best["metric"].startswith("eval/sampled/") and before is not None and before >= best["value"]:
        return [f"no checkpoint is better than the initial weights ({best['metric']} {before:.2f})"]
    return [f"best checkpoint {display(folder / best['path'])} ({best['metric']} {best['value']:.2f})"]


def _not_risen(summary: dict[str, Any]) -> str | None:
    """Return `success` (`reward` for tasks without success) if training could have raised it and did not."""
    for figure, highest in (("success", 1.0), ("reward", None)):
        before, after = summary.get(f"{figure}_before"), summary.get(f"{figure}_after")
        if before is not None and after is not None:
            return figure if after <= before != highest else None
    return None

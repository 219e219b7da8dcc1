"""The last audit of a run, with links to its evidence, and a table of all runs."""

from collections.abc import Sequence
from typing import Any

from agentfactory.audit.reports import read_audit
from agentfactory.base.findings import Severity
from agentfactory.viewer.runs.chain_index import Index
from agentfactory.viewer.runs.recipe_difference import settings_of
from agentfactory.viewer.runs.run_data import Run

FIGURES = ("success_before", "success_after", "greedy_after", "reward_after", "train_wall_seconds")
"""Figures of a summary that the table of runs shows."""
_LEFT_OUT = {"name", "output", "import_path", "prepare"}
"""Settings that differ between folders, and say nothing about training."""
_MOST_FINDINGS, _MOST_EVIDENCE, _MOST_TEXT = 200, 20, 5000
_MOST_KEYS = 12
"""Settings in the table; two recipes are compared as a whole on a page of their own."""


def audit_of(run: Run, index: Index) -> dict[str, Any] | None:
    """Return the report of the last audit of a run, whose evidence has the `link` of its chain, if it is known; None if
    there was no audit. Raises OSError or ValueError if it cannot be read."""
    report = read_audit(run.path, run.folder.within)
    if report is None:
        return None
    findings = [one for one in _list(report, "findings") if isinstance(one, dict)][:_MOST_FINDINGS]
    for finding in findings:
        finding["evidence"] = [one for one in _list(finding, "evidence") if isinstance(one, dict)][:_MOST_EVIDENCE]
        for one in finding["evidence"]:
            one["link"] = index.place_of(run.id, str(one.get("chain") or ""), str(one.get("group") or ""))
    looked_at = report.get("looked_at")
    return {
        "conclusion": str(report.get("conclusion") or "")[:_MOST_TEXT],
        "findings": findings,
        "unchecked": [one for one in _list(report, "unchecked") if isinstance(one, dict)],
        "looked_at": looked_at if isinstance(looked_at, dict) else {},
    }


def _list(values: dict[str, Any], name: str) -> list[Any]:
    found = values.get(name)
    return found if isinstance(found, list) else []


def table_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return a row per run: its status, last step, figures, the worst finding of its audit, and the first of the
    settings (`keys`) in which recipes differ; `differing` counts all. Supervised stages stand alone."""
    # a supervised stage, which only prepares, has other settings than reinforcement learning in any case
    shown = [run for run in runs if not run.supervised] or list(runs)
    settings = [_settings(run) for run in shown]
    every = list(dict.fromkeys(key for own in settings for key in own))
    differing = [key for key in every if len({own.get(key) for own in settings}) > 1]
    keys, rows = differing[:_MOST_KEYS], []
    for run, own in zip(shown, settings, strict=True):
        summary = run.summary()
        last: dict[str, Any] = next((line for line in reversed(run.lines) if "reward" in line or "loss" in line), {})
        figures = {name: summary.get(name) for name in FIGURES}
        figures |= {"reward": last.get("reward"), "loss": last.get("loss")}
        rows.append(
            {
                "run": run.id,
                "label": run.label,
                "status": run.status(),
                "step": run.step(),
                "figures": {name: value for name, value in figures.items() if isinstance(value, int | float)},
                "audit": _worst(run),
                "settings": [own.get(key) for key in keys],
            }
        )
    return {"keys": keys, "differing": len(differing), "rows": rows}


def _settings(run: Run) -> dict[str, str | None]:
    try:
        found = settings_of(run.recipe(), run.folder)
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in found.items() if key not in _LEFT_OUT}


def _worst(run: Run) -> str | None:
    """Return the highest severity of the last audit, "none" if it found nothing; None if there was no audit."""
    try:
        report = read_audit(run.path, run.folder.within)
    except (OSError, ValueError):
        return None
    if report is None:
        return None
    found = [one.get("severity") for one in _list(report, "findings") if isinstance(one, dict)]
    return next((str(level) for level in Severity if level in found), "none")

"""The output of `agentfactory eval`: a table per sampling mode and per source of the tasks."""

from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentfactory.recipe.composition import display
from agentfactory.rollout.evaluation.evaluate import Evaluation
from agentfactory.rollout.evaluation.pass_at_k import Estimate
from agentfactory.rollout.evaluation.side_by_side import Difference, OtherEvaluation, differences, read_means

_BESIDE = ("failed", "tool_calls", "sampled_tokens")
"""Means over all tasks that are shown below the estimates."""


def tables(found: Evaluation) -> list[str]:
    """Return the tables as text: metrics with their 95 % intervals over tasks, and a line on chains that failed."""
    told = [
        _table(mode, source, estimates, found.means if not source else {})
        for mode, sources in found.estimates.items()
        for source, estimates in sources.items()
    ]
    if failed := sum(found.failures.values()):
        reason, count = found.failures.most_common(1)[0]
        told.append(f"{failed} of {found.chains} chains failed and are excluded, {count} of them with: {reason}")
    return told


def compared(chains: Path, other: OtherEvaluation) -> list[str]:
    """Return the tables of an evaluation, from the folder of its chains, beside another one."""
    found, where = differences(read_means(chains), other.means), display(other.folder)
    if not found:
        problem = f"no task has a reward in both this evaluation and {where}"
        return [f"warning: nothing to compare: {problem}; fix: evaluate the same eval.data"]
    return [_beside(mode, where, metrics) for mode, metrics in found.items()]


def _beside(mode: str, where: str, metrics: dict[str, Difference]) -> str:
    table = Table()
    table.add_column("figure", overflow="fold")
    for name in ("this", "other", "difference"):
        table.add_column(name, justify="right")
    table.add_column("95 % interval")
    table.add_column("tasks", justify="right")
    for name, found in metrics.items():
        values = f"{found.this:.4f}", f"{found.other:.4f}", f"{found.difference.value:+.4f}"
        table.add_row(name, *values, _interval(found.difference, "+"), str(found.difference.tasks))
    return f"{mode}, beside {where}\n{_as_text(table)}"


def _table(mode: str, source: str, estimates: dict[str, Estimate], means: dict[str, float]) -> str:
    table = Table()
    table.add_column("figure", overflow="fold")
    table.add_column("value", justify="right")
    table.add_column("95 % interval")
    table.add_column("tasks", justify="right")
    for name, estimate in estimates.items():
        table.add_row(name, f"{estimate.value:.4f}", _interval(estimate), str(estimate.tasks))
    for name in _BESIDE:
        if f"{mode}/{name}" in means:
            table.add_row(name, f"{means[f'{mode}/{name}']:.4f}", "", "")
    return f"{mode}, {f'source {source}' if source else 'all tasks'}\n{_as_text(table)}"


def _interval(estimate: Estimate, sign: str = "") -> str:
    if estimate.low is None or estimate.high is None:
        return "not known"
    return f"{estimate.low:{sign}.4f} to {estimate.high:{sign}.4f}"


def _as_text(table: Table) -> str:
    # as text, because it is printed like the other lines and must not be wider
    console = Console(file=StringIO(), width=80, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().rstrip()

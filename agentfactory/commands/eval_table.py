"""The output of `agentfactory eval`: a table per sampling mode and per source of the tasks."""

from io import StringIO

from rich.console import Console
from rich.table import Table

from agentfactory.rollout.evaluation.evaluate import Evaluation
from agentfactory.rollout.evaluation.pass_at_k import Estimate

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


def _table(mode: str, source: str, estimates: dict[str, Estimate], means: dict[str, float]) -> str:
    table = Table()
    table.add_column("figure", overflow="fold")
    table.add_column("value", justify="right")
    table.add_column("95 % interval")
    table.add_column("tasks", justify="right")
    for name, estimate in estimates.items():
        known = estimate.low is not None and estimate.high is not None
        interval = f"{estimate.low:.4f} to {estimate.high:.4f}" if known else "not known"
        table.add_row(name, f"{estimate.value:.4f}", interval, str(estimate.tasks))
    for name in _BESIDE:
        if f"{mode}/{name}" in means:
            table.add_row(name, f"{means[f'{mode}/{name}']:.4f}", "", "")
    # as text, because it is printed like the other lines and must not be wider
    console = Console(file=StringIO(), width=80, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return f"{mode}, {f'source {source}' if source else 'all tasks'}\n{console.file.getvalue().rstrip()}"

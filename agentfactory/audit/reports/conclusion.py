"""The conclusion of an audit in three sentences: what the run did, what is wrong with it, what to do first."""

from agentfactory.audit.finding import Report, Severity
from agentfactory.audit.record import Record


def conclude(report: Report, record: Record) -> str:
    """Return three sentences on a run."""
    return " ".join((_what_it_did(record), _what_is_wrong(report), _what_to_do(report)))


def _what_it_did(record: Record) -> str:
    steps = [line for line in record.metrics if "step" in line and "grad_norm" in line]
    of = f" of {record.recipe.train.algorithm}" if record.recipe is not None else ""
    done = f"{len(steps):,} steps{of}" if steps else "no steps"
    groups = f" on {record.size:,} groups of chains" if record.size else ""
    before, after = (record.summary.get(f"success_{when}") for when in ("before", "after"))
    if before is not None and after is not None:
        result = f", and success on held-out tasks went from {before:.2f} to {after:.2f}"
    elif steps and "reward" in steps[-1]:
        result = f", and the mean reward of a step went from {steps[0]['reward']:.3g} to {steps[-1]['reward']:.3g}"
    else:
        result = ""
    return f"{record.name} ({record.kind}) has {done}{groups}{result}."


def _what_is_wrong(report: Report) -> str:
    wrong, warnings = report.of(Severity.WRONG), report.of(Severity.WARNING)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return f"Its figures cannot be trusted: {wrong[0].topic}: {wrong[0].text}{more}."
    if warnings:
        more = f" (and {len(warnings) - 1} more)" if len(warnings) > 1 else ""
        return f"Nothing that was checked is wrong, but {warnings[0].topic}: {warnings[0].text}{more}."
    return f"Nothing that was checked is wrong: {', '.join(report.looked_at) or 'there was nothing to check'}."


def _what_to_do(report: Report) -> str:
    first = next((finding for finding in report.findings if finding.severity is not Severity.NOTE), None)
    if first is not None:
        return f"First: {first.fix}."
    if report.unchecked:
        return f"Not checked: {', '.join(one.topic for one in report.unchecked)}."
    return "All checks could be made."

"""An audit's report as text for a terminal."""

from collections.abc import Iterator

from agentfactory.audit.finding import Report
from agentfactory.base.files.untrusted_files import printable


def lines_of(report: Report, conclusion: str) -> Iterator[str]:
    """Yield the lines of a report, the most severe findings first."""
    yield printable(conclusion)
    for finding in report.findings:
        yield ""
        yield printable(f"{finding.severity}: {finding.topic}: {finding.text}")
        for evidence in finding.evidence:
            parts = [part for part in (evidence.place, evidence.text) if part]
            yield printable(f"    {': '.join(parts)}".replace("\n", " "))
        if finding.fix:
            yield printable(f"    fix: {finding.fix}")
    if report.looked_at:
        yield ""
        yield "looked at:"
        yield from (printable(f"    {topic}: {what}") for topic, what in report.looked_at.items())
    if report.unchecked:
        yield ""
        yield "not checked:"
        yield from (printable(f"    {one.topic}: {one.why}".replace("\n", " ")) for one in report.unchecked)

"""An audit's report as a JSON object."""

from dataclasses import asdict
from typing import Any

from agentfactory.audit.finding import Report, Severity


def to_json(report: Report, conclusion: str) -> dict[str, Any]:
    """Return a report as JSON values: `conclusion`, `worst`, and per finding its severity, topic, text, fix and
    evidence."""
    plain = asdict(report)
    counts = {str(level): len(report.of(level)) for level in Severity}
    return {"run": plain.pop("run"), "conclusion": conclusion, "worst": report.worst, "counts": counts, **plain}

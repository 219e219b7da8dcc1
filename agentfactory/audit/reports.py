"""The report of an audit, its conclusion, its forms (text, JSON and one HTML file without scripts), and the reports of
`audit` and `replay` that are kept in the run's folder for the viewer."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from agentfactory.audit.record import Record
from agentfactory.base.files.disk import append, write_whole
from agentfactory.base.files.untrusted_files import lines_of, open_file, printable, read_json
from agentfactory.base.findings import Evidence, Finding, Severity


@dataclass(frozen=True)
class Unchecked:
    """A topic that could not be checked, and why."""

    topic: str
    why: str


@dataclass(frozen=True)
class Report:
    """The results of the audit of a run. `looked_at` has the number of things that each check has compared."""

    run: str
    kind: str
    findings: Sequence[Finding] = ()
    unchecked: Sequence[Unchecked] = ()
    looked_at: dict[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> Severity | None:
        """The highest severity of its findings; None without findings."""
        return next((level for level in Severity if any(one.severity is level for one in self.findings)), None)

    def of(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity is severity]


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


def text_lines(report: Report, conclusion: str) -> Iterator[str]:
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


def to_json(report: Report, conclusion: str) -> dict[str, Any]:
    """Return a report as JSON values: `conclusion`, `worst`, and its findings with their evidence."""
    plain = asdict(report)
    counts = {str(level): len(report.of(level)) for level in (Severity.WRONG, Severity.WARNING, Severity.NOTE)}
    return {"run": plain.pop("run"), "conclusion": conclusion, "worst": report.worst, "counts": counts, **plain}


_PAGE = Template("""\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Audit of $title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 0 auto; padding: 1rem }
body { color: #1c1c1c; background: #fff }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin-top: 2rem }
.conclusion { font-size: 1.05rem }
article { border-left: .3rem solid #999; margin: 1rem 0; padding: .1rem 0 .1rem .8rem; overflow-wrap: anywhere }
article.wrong { border-color: #b3261e } article.warning { border-color: #b26a00 } article.note { border-color: #5f6b7a }
.severity { font-weight: 600 } .wrong .severity { color: #b3261e } .warning .severity { color: #8a5200 }
ul { padding-left: 1.2rem } li { margin: .2rem 0 } code { font-size: .9em }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .2rem 1rem } dd { margin: 0 }
@media (max-width: 30rem) { dl { display: block } dd { margin: 0 0 .5rem } }
@media (prefers-color-scheme: dark) {
  body { color: #e6e6e6; background: #16181c } .wrong .severity { color: #ff8a80 } .warning .severity { color: #ffb74d }
}
</style>
<h1>Audit of $title</h1>
$body
</html>
""")


def page_of(reports: Sequence[tuple[Report, str]]) -> str:
    """Return the page of reports with their conclusions. All texts are escaped: agents may have written any."""
    title = escape(", ".join(report.run for report, _ in reports))
    return _PAGE.substitute(title=title, body="\n".join(_report(report, text) for report, text in reports))


def _report(report: Report, conclusion: str) -> str:
    parts = [f"<section>\n<h2>{escape(report.run)}</h2>", f'<p class="conclusion">{escape(conclusion)}</p>']
    parts += map(_finding, report.findings)
    parts += [_list("Looked at", report.looked_at.items())]
    parts += [_list("Not checked", ((one.topic, one.why) for one in report.unchecked))]
    return "\n".join([*filter(None, parts), "</section>"])


def _finding(finding: Finding) -> str:
    places = "\n".join(map(_evidence, finding.evidence))
    fix = f"<p>Fix: {escape(finding.fix)}</p>" if finding.fix else ""
    severity = f'<span class="severity">{finding.severity}</span>'
    head = f"<p>{severity} · {escape(finding.topic)}: {escape(finding.text)}</p>"
    return f'<article class="{finding.severity}">\n{head}\n{f"<ul>{places}</ul>" if places else ""}\n{fix}\n</article>'


def _evidence(evidence: Evidence) -> str:
    place = f"<code>{escape(evidence.place)}</code> " if evidence.place else ""
    return f"<li>{place}{escape(evidence.text)}</li>"


def _list(title: str, entries: Iterable[tuple[str, str]]) -> str:
    shown = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries)
    return f"<h2>{title}</h2>\n<dl>{shown}</dl>" if shown else ""


AUDIT = "audit.json"
REPLAYS = "replays.jsonl"
MOST_REPLAYS, SHOWN_REPLAYS = 10_000, 50
"""Lines that are read, and replays of a chain that are shown: the last ones."""


def save_audit(folder: Path, report: dict[str, Any]) -> bool:
    """Write the report of an audit; return whether the folder can be written."""
    if not os.access(folder, os.W_OK) or (folder / AUDIT).is_dir():
        return False
    write_whole(folder / AUDIT, f"{json.dumps(report, ensure_ascii=False, indent=1)}\n".encode("utf-8", "replace"))
    return True


def read_audit(folder: Path, within: Path) -> dict[str, Any] | None:
    """Return the report of the last audit; None if there is none. Raises OSError or ValueError if it cannot be read."""
    try:
        return read_json(folder / AUDIT, within)
    except FileNotFoundError:
        return None


def save_replay(folder: Path, replay: dict[str, Any]) -> bool:
    """Append the results of a replay; return whether the folder can be written."""
    if not os.access(folder, os.W_OK):
        return False
    append(folder / REPLAYS, f"{json.dumps(replay, ensure_ascii=False)}\n")
    return True


def read_replays(folder: Path, within: Path, chain: str) -> list[dict[str, Any]]:
    """Return the replays of a chain, in their order. Raises OSError or ValueError if they cannot be read."""
    try:
        with open_file(folder / REPLAYS, within) as file:
            found = [json.loads(line) for _, line in zip(range(MOST_REPLAYS), lines_of(file), strict=False)]
    except FileNotFoundError:
        return []
    known = [one for one in found if isinstance(one, dict) and one.get("chain") == chain]
    return [one for one in known if _is_replay(one)][-SHOWN_REPLAYS:]


def _is_replay(found: dict[str, Any]) -> bool:
    """Return whether a line has the form of a ranking, or of results."""
    turns, results = found.get("turns"), found.get("results")
    if isinstance(turns, list):
        return all(isinstance(one, dict) and _are_numbers(one.get("turn"), one.get("effect")) for one in turns)
    return isinstance(results, dict) and all(
        isinstance(one, dict) and _are_numbers(one.get("mean"), *(one.get("interval") or []))
        for one in results.values()
    )


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) for value in values)

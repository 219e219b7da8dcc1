"""An audit's report as one HTML file without scripts, to send to others."""

from collections.abc import Iterable, Sequence
from html import escape
from string import Template

from agentfactory.audit.finding import Evidence, Finding, Report

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

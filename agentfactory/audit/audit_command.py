"""`agentfactory audit`: its options and its exit status."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

from agentfactory.audit.reports import Report
from agentfactory.base.errors import SettingError
from agentfactory.base.findings import Severity

ABOUT = "check what a run did against its own files: tokens, masks, rewards, weights, tasks"
EXAMPLES = ["audit runs/mine", "audit runs/mine --html mine.html", "audit runs/mine --json"]

WRONG, WARNED = 1, 6
"""Exit statuses: a finding of severity wrong; warnings and nothing wrong."""


def add_options(parser: argparse.ArgumentParser) -> None:
    about = "a run folder, such as runs/quickstart, or files of another project's run"
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=about)
    parser.add_argument("--json", action="store_true", help="print JSON, one line per run")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one HTML file, without scripts")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Audit the runs, print the reports, and return the exit status. Raises SettingError: no run, or no file."""
    # these take a second to import
    from agentfactory.audit.audit import audit
    from agentfactory.audit.reports import conclude, page_of, save_audit, text_lines, to_json
    from agentfactory.audit.run_record import KIND, records_at

    if options.html is not None and not options.html.absolute().parent.is_dir():
        raise SettingError("--html", f"{options.html.parent} is not a folder", "create it first")
    found: list[tuple[Report, str]] = []
    # all paths are looked at before anything is printed
    records = [record for path in options.runs for record in records_at(path)]
    for record in records:
        report = asyncio.run(audit(record))
        conclusion = conclude(report, record)
        if record.kind == KIND and not save_audit(record.folder, to_json(report, conclusion)):
            print(f"{record.folder} cannot be written: the viewer will not show this audit", file=sys.stderr)
        if options.json:
            say(json.dumps(to_json(report, conclusion), ensure_ascii=False))
        else:
            say("\n".join([*([""] if found else []), *text_lines(report, conclusion)]))
        found.append((report, conclusion))
    if options.html is not None:
        try:
            options.html.write_text(page_of(found), encoding="utf-8", errors="replace")
        except OSError as error:
            raise SettingError(
                "--html", f"{options.html}: {error.strerror}", "name a file that can be written"
            ) from None
    worst = {report.worst for report, _ in found}
    return WRONG if Severity.WRONG in worst else WARNED if Severity.WARNING in worst else 0

"""The end of a run, and the errors in its logs."""

import re
from collections.abc import Iterator
from pathlib import Path

from agentfactory.audit.check import Check
from agentfactory.audit.record import Seen
from agentfactory.audit.run_record import KIND
from agentfactory.base.files.untrusted_files import open_file
from agentfactory.base.findings import Evidence, Finding, Severity
from agentfactory.launching.run_folder import Hold, RunFolderError

LOG_BYTES = 1 << 20
"""End of a log that is read."""
_ERROR = re.compile(
    r"^(?:[\d:, -]{10,} ERROR |(?:[\w.]+(?:Error|Exception|Failed|Exit|Stopped\w*)): )(.*)", re.MULTILINE
)
_PROOFS = re.compile(r"SyncError|proof|canary|checksum|digest|weights?\b|adapter|log-probabilit")
"""Words of an error that a proof of a sync has given."""


class EndingCheck(Check):
    """A run should end as its recipe says, and a run that stopped should say why."""

    topic = "the end of the run"

    def begin(self) -> None:
        self._logs = self.record.folder / "logs"

    async def note(self, seen: Seen) -> None:
        """Chains say nothing about the end."""

    def findings(self) -> Iterator[Finding]:
        record, recipe = self.record, self.record.recipe
        if not self.looked_at():
            return
        steps = [line["step"] for line in record.metrics if "grad_norm" in line]
        reached, planned = max(steps, default=0), recipe.train.steps if recipe is not None else None
        if record.summary.get("status") == "completed":
            return
        if self._is_running():
            yield self.remark(f"the run is at step {reached} and continues: only the part written so far was checked")
            return
        of = f" of {planned}" if planned else ""
        failed = record.summary.get("status") == "failed"
        reason = record.summary.get("reason", "")
        if reason and not failed:
            yield self.remark(f"the run ended after step {reached}{of}: {reason}", "continue it with --resume")
            return
        error = self._last_error() or (Evidence(reason, file="summary.json") if failed else None)
        if error is None:
            fix = "continue it with --resume; if the system killed it, give it more memory"
            yield self.warning(f"the run ended after step {reached}{of} without a word: it was killed", fix)
            return
        severity = Severity.WRONG if _PROOFS.search(error.text) else Severity.WARNING
        problem, _, fix = error.text.partition("; fix: ")
        text = f"the run stopped after step {reached}{of}: {problem}"
        yield Finding(severity, self.topic, text, fix or f"read {error.file}, and continue with --resume", [error])

    def _is_running(self) -> bool:
        try:
            with Hold(self.record.folder) as hold:
                hold.take()
            whole = self.record.folder.parent
            with Hold(whole) as hold:
                if (whole / ".lock").exists():
                    hold.take()
        except RunFolderError:
            return True
        return False

    def _last_error(self) -> Evidence | None:
        for name in ("train.log", "worker.log", "server.log"):
            text = _tail(self._logs / name, self.record.folder)
            if found := [match for match in _ERROR.finditer(text) if match[1].strip()]:
                return Evidence(found[-1][0].strip(), file=f"logs/{name}")
        return None

    def looked_at(self) -> str:
        folder = self.record.folder
        # `agentfactory eval` and `rollout` train nothing
        trains = any((folder / name).exists() for name in ("assignment.json", "trajectories/train.jsonl"))
        ours = self.record.kind == KIND and self._logs.is_dir()
        return "summary.json and the logs" if ours and (trains or self.record.metrics) else ""


def _tail(path: Path, within: Path) -> str:
    try:
        with open_file(path, within) as content:
            content.seek(max(0, content.seek(0, 2) - LOG_BYTES))
            return content.read().decode("utf-8", "replace")
    except OSError:
        return ""

"""The audit of a run: one pass over its groups by all checks."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from agentfactory.audit.check import Check, Opened, Parts, open_part
from agentfactory.audit.checks.behaviour import FormatCheck, OutcomeCheck, ToolCallCheck
from agentfactory.audit.checks.ending import EndingCheck
from agentfactory.audit.checks.exploits import ExploitCheck
from agentfactory.audit.checks.groups import GroupCheck
from agentfactory.audit.checks.lengths import LengthCheck
from agentfactory.audit.checks.metrics import MetricCheck
from agentfactory.audit.checks.replays import ReplayCheck
from agentfactory.audit.checks.rewards import RewardCheck
from agentfactory.audit.checks.tasks import TaskCheck
from agentfactory.audit.checks.tokens import GreedyCheck, TokenCheck, TrainedCheck
from agentfactory.audit.checks.weights import WeightCheck
from agentfactory.audit.record import READ, RECIPE, Places, Record
from agentfactory.audit.reports import Report, Unchecked
from agentfactory.base.errors import SettingError
from agentfactory.base.findings import Evidence, Finding, Severity
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.launching.run_folder import RunFolder
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.config import Part

CHECKS: Sequence[type[Check]] = (
    *(EndingCheck, WeightCheck, TokenCheck, TaskCheck, TrainedCheck, RewardCheck, ReplayCheck),
    *(ToolCallCheck, OutcomeCheck, GroupCheck, ExploitCheck, FormatCheck, LengthCheck, GreedyCheck, MetricCheck),
)
"""The checks of a run. Of equally severe findings, those of earlier checks come first: causes before symptoms."""
OPEN_SECONDS = 120.0


async def audit(record: Record) -> Report:
    """Check a run against its files. Starts the tool servers of its recipe, if it has one, and runs its rewards."""
    lacks = record.lacks = dict(record.lacks)
    async with AsyncExitStack() as stack:
        parts: Parts = {}
        if record.recipe is None:
            lacks.setdefault(RECIPE, f"{record.kind} saves no recipe of ours")
        else:
            try:
                async with asyncio.timeout(OPEN_SECONDS):
                    parts = await _open_parts(record, record.recipe, stack)
            except TimeoutError:
                lacks[RECIPE] = f"the recipe's tools did not open within {OPEN_SECONDS:g} s"
            except (SettingError, ToolInfrastructureError, ValueError, TypeError, OSError) as error:
                lacks[RECIPE] = f"the recipe's model, tools or rewards cannot be opened here: {error}"
        checks, unchecked = [], []
        for kind in CHECKS:
            missing = next((stream for stream in kind.needs if stream in lacks), None)
            if missing is None:
                checks.append(kind(record, parts))
            else:
                unchecked.append(Unchecked(kind.topic, lacks[missing]))
        contradictions = Places()
        for seen in record.groups():
            for check in checks:
                try:
                    await check.note(seen)
                except Exception as error:  # boundary: files that anybody may have changed
                    text = f"{check.topic}: {type(error).__name__}: {error}"
                    contradictions.add(Evidence(text, seen.group.id, file=seen.file))
        findings: list[Finding] = []
        for check in checks:
            try:
                findings += check.findings()
            except Exception as error:  # boundary: the same
                contradictions.add(Evidence(f"{check.topic}: {type(error).__name__}: {error}"))
        if places := contradictions:
            text = f"{places.total} groups cannot be checked, because their records contradict themselves"
            fix = "copy the run folder again; if they are still the same, look at what wrote them"
            findings.append(Finding(Severity.WRONG, READ, text, fix, places.kept))
    findings = sorted([*record.problems, *findings], key=lambda finding: list(Severity).index(finding.severity))
    unchecked += [one for check in checks for one in check.unchecked]
    looked_at = {check.topic: told for check in checks if (told := check.looked_at())}
    return Report(record.name, record.kind, findings, unchecked, looked_at)


async def _open_parts(record: Record, recipe: Recipe, stack: AsyncExitStack) -> Parts:
    """Open the parts of a recipe, and the same settings only once."""
    images = RunFolder(record.folder).images
    found: list[tuple[Part[Recipe], Opened]] = []
    parts: Parts = {}
    for held_out, each in ((False, recipe.parts()), (True, recipe.held_out_parts())):
        for part in each:
            opened = next((other for known, other in found if known.acts_like(part)), None)
            if opened is None:
                opened = await stack.enter_async_context(open_part(part.recipe, record.folder, images))
                found.append((part, opened))
            parts[held_out, part.name] = opened
    return parts

"""`agentfactory doctor`: check this machine, alone or for a recipe, and suggest fixes."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.findings import Finding, Severity, ok, problem, warning
from agentfactory.base.processes import parent_watch
from agentfactory.base.processes.memory import memory_room
from agentfactory.commands.doctor import machine_checks, recipe_checks
from agentfactory.launching.time_plan import plan_times
from agentfactory.recipe.checks import check_recipe, parts_of
from agentfactory.recipe.composition import display
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe, stages_of
from agentfactory.rollout.config import distinct
from agentfactory.rollout.model_hub import is_hub_name

Check = Callable[[], Iterable[Finding]]
_COLORS = {Severity.OK: "32", Severity.WARNING: "33", Severity.PROBLEM: "1;31"}


def run(
    recipe: str | None,
    overrides: Sequence[str],
    say: Callable[[str], None],
    *,
    coordinates: bool = False,
    look: Check | None = None,
) -> bool:
    """Print findings, also of `coordinates`, and without a problem those of `look`. Return True without a problem."""
    counts: Counter[Severity] = Counter()
    said = set()

    def findings() -> Iterator[Finding]:
        # a look ends with the plan for the lengths that it has seen
        found = examine(recipe, overrides, coordinates)
        yield from (finding for finding in found if look is None or finding.topic != "time")
        if look is not None and counts[Severity.PROBLEM]:
            yield warning("first look", "nothing was sampled, because of the problems above", "correct them first")
        elif look is not None:
            yield from _safely("first look", look)

    for finding in findings():
        # findings that several stages share are reported once
        if finding not in said:
            said.add(finding)
            counts[finding.severity] += 1
            level = f"{finding.severity:8}"
            if sys.stdout.isatty():
                level = f"\x1b[{_COLORS[finding.severity]}m{level}\x1b[0m"
            fix = f"\n{'':9}fix: {finding.fix}" if finding.fix else ""
            say(f"{level} {finding.topic}: {finding.text}{fix}")
    say(f"{_count(counts[Severity.PROBLEM], 'problem')}, {_count(counts[Severity.WARNING], 'warning')}")
    return not counts[Severity.PROBLEM]


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def examine(recipe: str | None, overrides: Sequence[str], coordinates: bool = False) -> Iterator[Finding]:
    """Yield all findings, the machine's first, each as soon as it is available."""
    stages: list[Recipe] = []
    yield from _safely("versions", machine_checks.check_versions)
    devices: dict[str, Any] = {"gpus": []}
    try:
        devices = parent_watch.answer_of("agentfactory.placement.machine")
    except RuntimeError as error:
        yield problem("devices", f"torch cannot be imported: {error}", "pip install --force-reinstall torch")
    else:
        yield from _safely("devices", partial(machine_checks.check_devices, devices))
    yield from _safely("memory", lambda: machine_checks.check_memory(memory_room()))
    if recipe is not None:
        lacks: list[SettingError] = []
        try:
            loaded = load_recipe(recipe, overrides)
            check_recipe(loaded, "train", lacks)
        except SettingError as error:
            yield problem("recipe", error.without_fix, error.fix)
        else:
            stages = stages_of(loaded)
            if not lacks:
                yield ok("recipe", f"{loaded.name} is valid")
        for lack in {str(lack): lack for lack in lacks}.values():
            yield problem("recipe", lack.without_fix, lack.fix)
    yield from _safely("disk", partial(machine_checks.check_disk, stages[0].output if stages else Path.cwd()))
    if not stages:
        yield from _safely("open files", machine_checks.check_open_files)
    code = any(recipe_checks.runs_code(part.recipe) for stage in stages for part in parts_of(stage))
    yield from _safely("sandbox", partial(machine_checks.check_sandbox, code))
    for stage in stages:
        for subject, check in _checks(stage, len(devices["gpus"])):
            yield from _safely(subject, check)
    yield from _safely("time", lambda: map(partial(ok, "time"), map(str, plan_times(stages))))
    if coordinates and stages:
        from agentfactory.commands.doctor.coordinate_checks import check_coordinates

        yield from _safely("coordinates", partial(check_coordinates, stages[-1]))


def _checks(recipe: Recipe, gpus: int) -> Iterator[tuple[str, Check]]:
    yield "open files", partial(machine_checks.check_open_files, recipe.most_chains(recipe.rollout.workers))
    yield "run folder", partial(recipe_checks.check_output, recipe)
    yield "memory", lambda: recipe_checks.check_fit(recipe, memory_room())
    yield "model.dtype", partial(recipe_checks.check_dtype, recipe)
    yield "hub", partial(recipe_checks.check_hub, recipe)
    for part in distinct(parts_of(recipe)):
        own, of = part.recipe, f" of source {part.name}" if part.name else ""
        if Path(own.model.path).is_dir() or is_hub_name(own.model.path):
            yield f"format{of}", partial(recipe_checks.check_format, own)
        if own.rewards and recipe_checks.has_tasks(own):
            yield f"rewards{of}", partial(recipe_checks.check_rewards, own)
        elif own.data is not None and own.data.file is not None and not own.data.file.exists():
            text = f"not checked with rewards and format: {display(own.data.file)} does not exist yet"
            fix = "run `agentfactory doctor` again once `agentfactory train` has created it"
            yield part.section, partial(iter, [warning(part.section, text, fix)])
    if recipe_checks.starts_server(recipe):
        yield "port", partial(recipe_checks.check_address, recipe)
        if recipe.server.engine == "vllm":
            yield "vllm", partial(recipe_checks.check_vllm, recipe, gpus)
    elif recipe.server.url is not None:
        yield "server", partial(recipe_checks.check_servers, recipe)


def _safely(subject: str, check: Check) -> Iterator[Finding]:
    """Yield a check's findings. If the check itself fails, this is a finding, and the other checks continue."""
    try:
        yield from check()
    except Exception as error:  # boundary: a machine can have any fault
        text = f"the check failed: {type(error).__name__}: {error}"
        yield problem(subject, text, "fix the cause, or report a bug of `agentfactory doctor`")

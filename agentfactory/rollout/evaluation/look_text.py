"""A look at finished chains in words, with an estimate of the time that training will sample."""

from collections import Counter
from dataclasses import dataclass
from statistics import fmean

from agentfactory.rollout.chains.outcome_warnings import commonest_ending
from agentfactory.rollout.evaluation.first_look import Look, plural
from agentfactory.rollout.groups.group_filter import Worth


@dataclass(frozen=True)
class Schedule:
    """The chains of one training step, and the number of steps. `at_once`: how many chains ran at a time during the
    look; `most`: how many may run."""

    chains: int
    steps: int
    at_once: int
    most: int


def describe(look: Look, schedule: Schedule | None = None) -> list[str]:
    """Return the look as lines of text. `schedule`: also estimate how long a step and the run sample."""
    lines = [f"{plural(look.chains, 'chain')} of {plural(look.tasks, 'task')}"]
    if not look.chains:
        return lines
    lines.append(f"calls: {_calls(look)}")
    if look.offer.specs and look.first_turns:
        lines.append(f"first turns: {_first_turns(look)}")
    lines += [f"first turn {text}" for text in look.shown]
    outcomes: Counter[str] = Counter()
    for (outcome, _), count in look.endings.items():
        outcomes[outcome] += count
    lines.append(
        f"ends: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.most_common())}{_failure(look)}"
    )
    lines.append(f"rewards: {_rewards(look)}")
    sampled = "" if look.tokens is None else f"{look.tokens:.0f} tokens sampled"
    rows = f"{look.row_tokens:.0f} with prompts and results" if look.row_tokens else ""
    sizes = ", ".join(part for part in (sampled, rows, f"{look.seconds:.1f} s") if part)
    waits = [f"{seconds:.1f} s of it waiting for {name}" for name, seconds in look.waits.items() if seconds >= 0.1]
    lines.append(f"a chain: {', '.join([sizes, *waits])}")
    if schedule is not None and look.seconds:
        lines.append(f"time: {_time(look, schedule)}")
    return lines


def _calls(look: Look) -> str:
    told = [
        f"{look.called} of {look.chains} chains called a tool",
        f"{look.malformed} had a malformed turn",
        f"{look.cut} had a turn cut at rollout.max_tokens={look.offer.config.max_tokens}",
    ]
    told += [f"{plural(count, 'call')} ended as {kind}" for kind, count in look.misuses.items() if count]
    return ", ".join(told) + ("" if look.offer.specs else "; the recipe offers no tools")


def _first_turns(look: Look) -> str:
    told = [f"{look.offer.format} reads a call in {look.read} of {look.first_turns}"]
    others = [f"{name} in {count}" for name, count in look.formats.most_common(2)]
    told += [f"{others[0]} of the others", *others[1:]] if others else []
    if look.named:
        names = "names" if look.named == 1 else "name"
        more = " more" if look.formats else ""
        told.append(f"{look.named}{more} {names} a tool without a call that a format reads")
    return ", ".join(told)


def _failure(look: Look) -> str:
    failed = Counter({ending: count for ending, count in look.endings.items() if ending[1]})
    return f"; {commonest_ending(failed, look.chains)}" if failed else ""


def _rewards(look: Look) -> str:
    if not look.rewards:
        return "no chain has one"
    low, high = min(look.rewards), max(look.rewards)
    told = f"mean {fmean(look.rewards):.3g}, from {low:g} to {high:g}" if low < high else f"all {low:g}"
    told += ", with different turn rewards" if low == high and look.different > 1 else ""
    if look.offer.config.group_size == 1 or not look.offer.judged:
        return told
    if not (groups := look.worths.total()):
        return f"{told}; whether they differ within a group is not known, because each task has one chain"
    teach, size = look.worths[Worth.TEACHES], look.offer.config.group_size
    if look.compared < size:
        return (
            f"{told}; they differ in {teach} of {plural(groups, 'group')} of {look.compared}; training compares {size}"
        )
    rest = "" if teach == groups else ": the others would teach nothing" if teach else ": none would teach"
    return f"{told}; they differ in {teach} of {plural(groups, 'group')}{rest}"


def _time(look: Look, schedule: Schedule) -> str:
    """Estimate the time for sampling by Little's law: with n chains at a time, one ends every 1/n of its duration."""
    most = min(schedule.most, schedule.chains)
    slowest = look.seconds * max(schedule.chains / max(schedule.at_once, 1), 1.0)
    fastest = min(slowest, look.seconds * max(schedule.chains / most, 1.0))

    def between(times: int) -> str:
        low, high = clock(fastest * times), clock(slowest * times)
        return f"about {low}" if fastest > 0.8 * slowest else f"{low} to {high}"

    return (
        f"a step samples its {plural(schedule.chains, 'chain')} in {between(1)}, and the run its "
        f"{plural(schedule.steps, 'step')} in {between(schedule.steps)}; updates and syncs come on top"
    )


def clock(seconds: float) -> str:
    """Return a duration as text."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"

"""Advice on what a look at finished chains has shown, with the setting to change."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agentfactory.base.messages import CallError
from agentfactory.rollout.evaluation.first_look import Look, plural
from agentfactory.rollout.groups.group_filter import Worth
from agentfactory.rollout.text.parsers import load_parser

PAGE = "docs/first-look.md"
MANY, MOST = 0.25, 0.5
"""Shares of chains beyond which there is advice: with a turn that was cut; with a malformed call."""
WAITS, SHORT_WAIT = 0.5, 0.01
"""Share of a chain's time, and seconds, of a wait for a tool server's process beyond which there is advice."""
ENOUGH_CHAINS = 64
"""Chains needed for it: the first ones wait for the first processes."""


@dataclass(frozen=True)
class Advice:
    """One thing that keeps a recipe from training well. `topic` identifies it."""

    topic: str
    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}; fix: {self.fix}"


def advise(look: Look) -> list[Advice]:
    """Return advice on what was seen, the most important first."""
    found: list[Advice] = []
    for judge in _JUDGES:
        found += judge(look)
    return found


def missing_calls(look: Look) -> Iterator[Advice]:
    """Advise if no chain called a tool although tools are offered, if fewer than one of each group did, or if another
    format reads more than the recipe's."""
    if not look.offer.specs or not look.ended:
        return
    # with one call in each group, its advantage shows whether calls pay
    size = max(look.offer.config.group_size, 2)
    if look.called == 0:
        text = f"no chain of {look.ended} in {plural(look.groups, 'group')} called a tool, though {look.offer.tools}"
    elif look.called * size < look.ended:
        few = f"only {look.called} of {look.ended} chains called a tool, fewer than 1 in {size}"
        text = f"{few}, though {look.offer.tools}"
    else:
        text = ""
    whys, fix = [], ""
    if look.called == 0 and look.read:
        whys.append(
            f"{look.offer.format} reads a call in {look.read} of {look.first_turns} first turns, but none was made"
        )
        fix = "offer the recipe's tools in each request of rollout.agent, and make the calls that come back"
    if (other := look.other_format) is not None and other[1] > look.read:
        name, count = other
        share = f"{count} of {look.first_turns} first turns ({count / look.first_turns:.0%})"
        whys.append(f"{name} reads a call in {share}, {look.offer.format} in {look.read}")
        fix = _fix_format(name, look)
    if look.named > look.read:
        turns = "first turns name" if look.named > 1 else "first turn names"
        whys.append(f"{look.named} {'more ' if whys else ''}{turns} a tool, but no format reads a call there")
        fix = fix or f"read them, and show the form of a call in {look.offer.prompt}, or begin with an sft stage"
    if look.called == 0 and (unknown := look.misuses[CallError.UNKNOWN_TOOL]):
        whys.append(f"{plural(unknown, 'call')} named a tool that does not exist")
    if look.called == 0 and look.malformed > MOST * look.ended:
        whys.append(f"{look.malformed} had a turn that {look.offer.format} could not read")
        fix = fix or _fix_malformed(look)
    fix = fix or f"say in {look.offer.prompt} when to use the tools, or begin with an sft stage on chains that do"
    if text or whys:
        yield Advice("tool calls", "; ".join(part for part in (text, *whys) if part), fix)


def _fix_format(name: str, look: Look) -> str:
    stage = "an sft stage on chains in the recipe's format"
    if load_parser(name).native:
        return f"a model.chat_template that writes calls as {name} does, or {stage}"
    # requests of an agent with its own loop need a native format
    return stage if look.offer.own_loop else f"rollout.parser={name}, or {stage}"


def _fix_malformed(look: Look) -> str:
    stage = "an sft stage on well-formed chains"
    return stage if look.offer.own_loop else f"another rollout.parser, or {stage}"


def malformed_turns(look: Look) -> Iterator[Advice]:
    """Advise if most chains have a call that cannot be parsed, though some call tools."""
    if look.called and look.malformed > MOST * look.ended:
        text = f"{look.malformed} of {look.ended} chains had a turn that {look.offer.format} could not read"
        yield Advice("malformed turns", text, _fix_malformed(look))


def equal_rewards(look: Look) -> Iterator[Advice]:
    """Advise if all rewards are equal, or those of each group."""
    several, teach = look.worths.total(), look.worths[Worth.TEACHES]
    if len(look.rewards) < 2 or not look.offer.judged:
        return
    if look.different == 1:
        reward = look.rewards[0]
        text = f"the rewards of all {len(look.rewards)} chains in {plural(look.groups, 'group')} are {reward:g}"
        fix = "easier rows of data, a reward that gives partial credit (rewards), or an sft stage first"
        if reward > 0:
            fix = "harder rows of data, or a reward that tells good chains from better ones (rewards)"
        yield Advice("equal rewards", f"{text}: such groups teach nothing", fix)
    elif several > 1 and teach == 0 and look.compared == look.offer.config.group_size:
        text = f"in each of {several} groups all chains have the same reward: such groups teach nothing"
        fix = "rows of data that the model solves sometimes, a finer reward (rewards), or a larger rollout.group_size"
        yield Advice("equal rewards", text, fix)


def cut_turns(look: Look) -> Iterator[Advice]:
    """Advise if turns of many chains were cut."""
    most = look.offer.config.max_tokens
    if look.cut >= MANY * look.ended and look.cut:
        text = f"rollout.max_tokens={most} cut a turn of {look.cut} of {look.ended} chains"
        yield Advice(
            "cut turns", text, f"rollout.max_tokens={2 * most}, or ask for short answers in {look.offer.prompt}"
        )


def slow_starts(look: Look) -> Iterator[Advice]:
    """Advise if chains mostly wait for the processes of a tool server."""
    if look.chains < ENOUGH_CHAINS:
        return
    for name, (cause, fix) in look.offer.why_wait.items():
        wait = look.waits.get(name, 0.0)
        if wait > WAITS * look.seconds and wait >= SHORT_WAIT:
            share = f"chains spend {wait / look.seconds:.0%} of their time waiting for a process of tool server {name}"
            yield Advice(f"waits for {name}", f"{share} ({wait:.1f} s each): {cause}", fix)


_JUDGES: tuple[Callable[[Look], Iterator[Advice]], ...] = (
    missing_calls,
    malformed_turns,
    equal_rewards,
    cut_turns,
    slow_starts,
)

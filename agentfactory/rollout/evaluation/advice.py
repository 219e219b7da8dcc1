"""Advice on what finished chains have shown, with the setting to change, and alarms of a running training: advice that
holds for so many groups in a row that it is no chance."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from agentfactory.base.errors import plural
from agentfactory.base.findings import Finding, warning
from agentfactory.base.messages import CallError
from agentfactory.base.user_code.entry_points import load_named
from agentfactory.rollout.config import EqualRewards
from agentfactory.rollout.evaluation import rules
from agentfactory.rollout.evaluation.first_look import Look, Offer, calls_tool, look_at
from agentfactory.rollout.evaluation.rules import ENOUGH_CHAINS, UNREADABLE, fix_unreadable
from agentfactory.rollout.groups.group_filter import Worth, worth
from agentfactory.rollout.text.parsers import load_parser
from agentfactory.rollout.trajectory import Group, Trajectory

PAGE = "docs/first-look.md"
CUT = 0.25
"""Share of chains with a turn that was cut beyond which there is advice."""
WAITS, SHORT_WAIT = 0.5, 0.01
"""Share of a chain's time, and seconds, of a wait for a tool server's process beyond which there is advice."""
GROUPS = 8
"""Minimum number of groups that an alarm covers; they have at least ENOUGH_CHAINS chains."""


def advise(look: Look) -> list[Finding]:
    """Return advice on what was seen, the most important first."""
    judges = (missing_calls, malformed_turns, equal_rewards, cut_turns, slow_starts, held_turns)
    return [advice for judge in judges for advice in judge(look)]


def missing_calls(look: Look) -> Iterator[Finding]:
    """Advise if fewer than one chain of each group called a tool, or if another format reads more than the recipe's."""
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
        reads = f"{look.offer.format} reads a call in {look.read} of {look.first_turns} first turns"
        whys.append(f"{reads}, but none was made")
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
    if look.called == 0 and look.malformed > UNREADABLE * look.ended:
        whys.append(f"{look.malformed} had a turn that {look.offer.format} could not read")
        fix = fix or fix_unreadable(look.offer.own_loop)
    fix = fix or f"say in {look.offer.prompt} when to use the tools, or begin with an sft stage on chains that do"
    if text or whys:
        yield warning("tool calls", "; ".join(part for part in (text, *whys) if part), fix)


def _fix_format(name: str, look: Look) -> str:
    stage = "an sft stage on chains in the recipe's format"
    if load_parser(name).native:
        return f"a model.chat_template that writes calls as {name} does, or {stage}"
    # requests of an agent with its own loop need a native format
    return stage if look.offer.own_loop else f"rollout.parser={name}, or {stage}"


def malformed_turns(look: Look) -> Iterator[Finding]:
    """Advise if most chains have a call that cannot be parsed, though some call tools."""
    if look.called and look.malformed > UNREADABLE * look.ended:
        text = f"{look.malformed} of {look.ended} chains had a turn that {look.offer.format} could not read"
        yield warning("malformed turns", text, fix_unreadable(look.offer.own_loop))


def equal_rewards(look: Look) -> Iterator[Finding]:
    """Advise if all rewards are equal, or those of each group of the size that training compares."""
    if len(look.rewards) < 2 or not look.offer.judged:
        return
    alike, several = look.different == 1, look.worths.total()
    compared = several if look.compared == look.offer.config.group_size else 0
    found = rules.equal_rewards(
        Counter(look.rewards), alike, look.groups if alike else compared, several - look.worths[Worth.TEACHES]
    )
    if found is not None:
        yield found


def cut_turns(look: Look) -> Iterator[Finding]:
    most = look.offer.config.max_tokens
    if look.cut and look.cut >= CUT * look.ended:
        text = f"rollout.max_tokens={most} cut a turn of {look.cut} of {look.ended} chains"
        fix = f"rollout.max_tokens={2 * most}, or ask for short answers in {look.offer.prompt}"
        yield warning("cut turns", text, fix)


def slow_starts(look: Look) -> Iterator[Finding]:
    """Advise if chains mostly wait for the processes of a tool server; the first ones wait for the first processes."""
    if look.chains < ENOUGH_CHAINS:
        return
    for name, (cause, fix) in look.offer.why_wait.items():
        wait = look.waits.get(name, 0.0)
        if wait > WAITS * look.seconds and wait >= SHORT_WAIT:
            share = f"chains spend {wait / look.seconds:.0%} of their time waiting for a process of tool server {name}"
            yield warning(f"waits for {name}", f"{share} ({wait:.1f} s each): {cause}", fix)


def held_turns(look: Look) -> Iterator[Finding]:
    """Advise if chains that have begun mostly wait for room in the servers' caches."""
    if look.chains >= ENOUGH_CHAINS and look.held > max(WAITS * look.seconds, SHORT_WAIT):
        share = f"{look.held / look.seconds:.0%} of the chains' time ({look.held:.1f} s each)"
        text = f"turns are held for {share}, because their contexts outgrow the servers' caches"
        fix = "raise server.max_num_seqs (embedded) or server.options.gpu_memory_utilization (vllm), add a server, or "
        yield warning("held turns", text, f"{fix}lower rollout.max_total_tokens")


def one_chain(look: Look) -> Iterator[Finding]:
    text = f"in {look.groups} groups in a row all chains have the same sampled tokens"
    yield warning("equal samples", text, rules.DRAW)


@dataclass
class _Streak:
    """Groups in a row with a sign of trouble. When there are enough of them, `judge` looks at them all."""

    has_sign: Callable[[Group], bool]
    judge: Callable[[Look], Iterator[Finding]]
    enough: int = GROUPS
    groups: list[Group] = field(default_factory=list)

    def note(self, group: Group, offer: Offer) -> list[Finding]:
        self.groups = [*self.groups, group] if self.has_sign(group) else []
        if len(self.groups) < self.enough or sum(len(one.trajectories) for one in self.groups) < ENOUGH_CHAINS:
            return []
        look, self.groups = look_at(self.groups, offer), []
        return list(self.judge(look))


class Alarms:
    """The alarms of a run whose batches have `batch_size` groups. Each is given once."""

    def __init__(self, offer: Offer, batch_size: int) -> None:
        self.offer = offer
        self._streaks: list[_Streak] = []
        if offer.specs:
            self._streaks.append(_Streak(_calls_nothing, missing_calls))
        # with KEEP, a step's metrics show it: symptom no_gradient
        if offer.config.equal_rewards is not EqualRewards.KEEP:
            enough = max(GROUPS, rules.EQUAL_STEPS * batch_size)
            self._streaks.append(_Streak(self._is_left_out, equal_rewards, enough))
        self._streaks.append(_Streak(_samples_one_chain, one_chain))
        self._streaks.append(_Streak(lambda group: True, held_turns))
        if offer.why_wait:
            self._streaks.append(_Streak(lambda group: True, slow_starts))
        self._exploits = load_named("agentfactory.people.judges.exploits:Exploits")()
        self._told: set[str] = set()

    def note(self, group: Group) -> list[Finding]:
        found = [(streak, streak.note(group, self.offer)) for streak in self._streaks]
        self._streaks = [streak for streak, advice in found if not advice]
        signs = self._exploits.note(group) if self.offer.judged else []
        new = [one for one in signs if one.topic not in self._told]
        self._told |= {one.topic for one in new}
        return [one for _, advice in found for one in advice] + new

    def _is_left_out(self, group: Group) -> bool:
        return worth(group.trajectories, self.offer.config) is Worth.EQUAL and not _solved(group.trajectories)


def _samples_one_chain(group: Group) -> bool:
    return rules.could_differ(group.trajectories) and rules.are_equal(group.trajectories)


def _calls_nothing(group: Group) -> bool:
    # failed chains have warnings of their own
    ended = [chain for chain in group.trajectories if not chain.outcome.failed]
    return not _solved(ended) and not any(map(calls_tool, ended))


def _solved(chains: Sequence[Trajectory]) -> bool:
    return all(chain.metrics.get("success") == 1.0 for chain in chains)

"""A look at what a model does with a recipe, computed from finished chains: calls, endings, rewards, size and time.
`agentfactory doctor --sample`, `eval`, `rollout` and the beginning of `train` show it with `advice`."""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from statistics import fmean
from typing import Any

import numpy as np

from agentfactory.base.errors import plural
from agentfactory.base.messages import CallError, Message, ToolSpec, text_of
from agentfactory.rollout.chains.outcome_warnings import commonest_ending
from agentfactory.rollout.config import RolloutConfig
from agentfactory.rollout.evaluation.rules import offered
from agentfactory.rollout.groups.group_filter import Worth, worth
from agentfactory.rollout.text.parsers import PARSERS, Parser, load_parser
from agentfactory.rollout.text.parsers.parser import split_reasoning
from agentfactory.rollout.trajectory import Activity, Group, Trajectory

SHOWN_TURNS, SHOWN_CHARACTERS = 3, 240
READ_TEXTS = 256


@dataclass(frozen=True)
class Offer:
    """A recipe's offer to its chains: tools, call format, and `rollout` settings."""

    config: RolloutConfig
    specs: Sequence[ToolSpec]
    parser: Parser
    why_wait: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Tool server -> why chains wait for a process of it, and the setting to change."""
    own_loop: bool = False
    """True if an agent with its own loop writes the prompts and offers the tools."""
    judged: bool = True
    """False if rewards are only reported, because a teacher alone trains the policy."""

    @property
    def tools(self) -> str:
        return offered([spec.name for spec in self.specs])

    @property
    def format(self) -> str:
        """The name of the format, as `rollout.parser` says it."""
        name = format_name(self.parser) or (self.config.parser if self.config.parser != "auto" else "the endpoint")
        return name if name == self.config.parser else f"{name} (rollout.parser={self.config.parser})"

    @property
    def prompt(self) -> str:
        return "the prompt of rollout.agent" if self.own_loop else "rollout.system_prompt"


@dataclass
class Look:
    offer: Offer
    chains: int = 0
    groups: int = 0
    tasks: int = 0
    """Different tasks: a sample that is larger than the data has several groups of one task."""
    failed: int = 0
    called: int = 0
    """Chains that called a tool that exists, in the recipe's format."""
    own: int = 0
    """Chains of `called` whose agent called tools in its own code, or brought them: no turn calls one of the recipe."""
    malformed: int = 0
    cut: int = 0
    """Chains with a turn that was cut at rollout.max_tokens."""
    misuses: Counter[str] = field(default_factory=Counter)
    endings: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(outcome, error) -> chains."""
    rewards: list[float] = field(default_factory=list)
    different: int = 0
    """Different rewards, with the turn rewards."""
    worths: Counter[Worth] = field(default_factory=Counter)
    """Training signal -> groups of several chains."""
    compared: int = 0
    tokens: float | None = None
    """Sampled tokens of a chain that did not fail, mean; None if unknown."""
    lengths: list[tuple[float, ...]] = field(default_factory=list)
    """(tokens of the prompt, turns, sampled tokens, all tokens) of each such chain with rows."""
    row_tokens: float = 0.0
    seconds: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    """Tool server -> seconds that it waits for an instance of it, mean."""
    held: float = 0.0
    """Seconds that its turns wait for room in the servers' caches, mean."""
    first_turns: int = 0
    read: int = 0
    """First turns in which the recipe's format reads a call of a known tool."""
    unread: list[str] = field(default_factory=list)
    """The other first turns, without reasoning, of chains that called no tool."""
    shown: list[str] = field(default_factory=list)
    """First turns as text, with their reward or outcome, one of each group as far as there are enough groups."""

    @property
    def ended(self) -> int:
        return self.chains - self.failed

    @cached_property
    def formats(self) -> Counter[str]:
        """Other format -> first turns in which it reads a call, and the recipe's does not; the best one first."""
        if not self.offer.specs:
            return Counter()
        found = formats_that_read(self.unread[:READ_TEXTS], self.offer.specs)
        found.pop(format_name(self.offer.parser) or "", None)
        return found

    @property
    def other_format(self) -> tuple[str, int] | None:
        """The other format that reads the most first turns, and their number; None if none does."""
        return next(iter(self.formats.items()), None)

    @cached_property
    def named(self) -> int:
        """First turns that name an offered tool, and in which neither the recipe's nor the best format reads one."""
        if not self.offer.specs:
            return 0
        # many tools are called by a common word, so it must stand as code does
        name = f"(?:{'|'.join(re.escape(spec.name) for spec in self.offer.specs)})"
        names = re.compile(rf"""["'`<]{name}\b|\b{name}["'`>(]""")
        naming = sum(names.search(text) is not None for text in self.unread[:READ_TEXTS])
        return max(0, naming - (self.other_format[1] if self.other_format else 0))


class FirstGroups:
    """The groups of a beginning run to look at: the first batch, and the first group of each other one of `sources`."""

    def __init__(self, batch: int, sources: Collection[str]) -> None:
        self._wanted = batch
        self._unseen = set(sources)
        self._begun: list[Group] = []

    def take(self, group: Group) -> list[Group]:
        """Note a group that has ended. Return the groups to look at now, mostly none."""
        if group.source not in self._unseen:
            return []
        self._begun.append(group)
        if len(self._begun) < self._wanted:
            return []
        found, self._begun, self._wanted = self._begun, [], 1
        self._unseen -= {one.source for one in found}
        return found


def calls_tool(chain: Trajectory) -> bool:
    unknown = chain.metrics.get(f"tool_errors/{CallError.UNKNOWN_TOOL}", 0.0)
    return chain.metrics.get("tool_calls", 0.0) > unknown


def look_at(groups: Sequence[Group], offer: Offer) -> Look:
    chains = [chain for group in groups for chain in group.trajectories]
    several = [group.trajectories for group in groups if len(group.trajectories) > 1]
    look = Look(
        offer,
        chains=len(chains),
        groups=len(groups),
        tasks=len({repr(group.task) for group in groups}),
        failed=sum(chain.outcome.failed for chain in chains),
        called=sum(calls_tool(chain) for chain in chains),
        # a call that was cut says nothing about its format
        malformed=sum(len(chain.malformed_turns) > chain.metrics.get("truncated_turns", 0) for chain in chains),
        cut=sum(chain.metrics.get("truncated_turns", 0) > 0 for chain in chains),
        endings=Counter((chain.outcome.value, chain.error or "") for chain in chains),
        rewards=[chain.reward for chain in chains if chain.reward is not None],
        different=len({(chain.reward, *(chain.turn_rewards or ())) for chain in chains if chain.reward is not None}),
        worths=Counter(worth(several_of, offer.config) for several_of in several),
        compared=max(map(len, several), default=1),
    )
    for kind in (CallError.UNKNOWN_TOOL, CallError.INVALID_ARGUMENTS):
        look.misuses[kind] += int(sum(chain.metrics.get(f"tool_errors/{kind}", 0) for chain in chains))
    if ended := [chain for chain in chains if not chain.outcome.failed]:
        sampled = [chain.metrics["sampled_tokens"] for chain in ended if "sampled_tokens" in chain.metrics]
        look.tokens = fmean(sampled) if sampled else None
        look.row_tokens = fmean(chain.metrics.get("row_tokens", 0.0) for chain in ended)
        for chain in (chain for chain in ended if chain.rows):
            mask = np.concatenate([row.mask for row in chain.rows])
            look.lengths.append((float(mask.argmax()), chain.turns, float(mask.sum()), float(mask.size)))
        look.seconds = fmean(chain.seconds for chain in ended)
        look.held = fmean(chain.metrics.get("held_seconds", 0.0) for chain in ended)
        for chain in ended:
            for stretch in chain.timeline:
                if stretch.activity is Activity.WAIT and stretch.turn is None:
                    waited = (stretch.end - stretch.start) / len(ended)
                    look.waits[stretch.name] = look.waits.get(stretch.name, 0.0) + waited
    _note_first_turns(look, groups)
    return look


def _note_first_turns(look: Look, groups: Sequence[Group]) -> None:
    offer, offered = look.offer, {spec.name for spec in look.offer.specs}
    # a chat endpoint reads the calls itself
    reads_text = not offer.parser.native or format_name(offer.parser) is not None
    # one of each group, then the second of each group, and so on
    ranks = zip_longest(*(group.trajectories for group in groups))
    for chain in (chain for rank in ranks for chain in rank if chain is not None):
        if (message := _first_turn(chain)) is None:
            continue
        look.first_turns += 1
        text = split_reasoning(text_of(message.get("content") or ""), opened=False)[2]
        names = _called_in(message)
        look.own += offer.own_loop and calls_tool(chain) and not any(offered & _called_in(m) for m in chain.messages)
        # an agent may bring tools that the recipe does not know, and its requests may offer none
        called = bool(names) and (offer.own_loop or not offered or names <= offered)
        if called or (reads_text and reads_call(offer.parser, text, offer.specs)):
            look.read += 1
        elif not calls_tool(chain):
            look.unread.append(text)
        if len(look.shown) < SHOWN_TURNS:
            verdict = str(chain.outcome) if chain.reward is None else f"reward {chain.reward:g}"
            look.shown.append(f"({verdict}) {_shown(message)}")


def _called_in(message: Message) -> set[str]:
    return {call["function"]["name"] for call in message.get("tool_calls") or []}


def _first_turn(chain: Trajectory) -> Message | None:
    """Return the first turn that the model took; a task may begin with earlier assistant messages."""
    said = [message for message in chain.messages if message["role"] == "assistant"]
    return said[-chain.turns] if 0 < chain.turns <= len(said) else None


def _shown(message: Message) -> str:
    parts = [str(message.get("reasoning_content") or ""), text_of(message.get("content") or "")]
    parts += [f"[calls {_written(call['function'])}]" for call in message.get("tool_calls") or []]
    text = " ".join(part for part in parts if part)
    # an untrained model may write the control characters of a terminal
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    if len(text) <= SHOWN_CHARACTERS:
        return text or "(empty)"
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} [...] {text[-half:]}"


def _written(function: dict[str, Any]) -> str:
    name, arguments = function["name"], function["arguments"]
    return f"{name} {arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)}"


def format_name(parser: Parser) -> str | None:
    """Return the name in PARSERS of a parser; None for a custom one, or for that of a chat endpoint."""
    place = f"{type(parser).__module__}:{type(parser).__qualname__}"
    return next((name for name, known in PARSERS.items() if known == place), None)


def formats_that_read(texts: Sequence[str], specs: Sequence[ToolSpec]) -> Counter[str]:
    """Return for each format in PARSERS the number of `texts` that it reads as calls of these tools; formats that read
    none are left out. Formats in plain text, which need no chat template, come before others that read as many."""
    found: Counter[str] = Counter()
    for name, parser in sorted(((name, load_parser(name)) for name in PARSERS), key=lambda pair: pair[1].native):
        try:
            parser.instructions(specs)
        except ValueError:
            continue
        if read := sum(reads_call(parser, text, specs) for text in texts):
            found[name] = read
    return Counter(dict(found.most_common()))


def reads_call(parser: Parser, text: str, specs: Sequence[ToolSpec]) -> bool:
    """Return whether a parser reads at least one call in `text`, and only calls of offered tools."""
    found = parser.parse(text, specs)
    names = {name for name, _ in found.calls}
    return found.error is None and bool(names) and names <= {spec.name for spec in specs}


def describe(look: Look) -> list[str]:
    """Return the look as lines of text."""
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
    ends = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    failed = Counter({ending: count for ending, count in look.endings.items() if ending[1]})
    lines.append(f"ends: {ends}{f'; {commonest_ending(failed, look.chains)}' if failed else ''}")
    lines.append(f"rewards: {_rewards(look)}")
    sampled = "" if look.tokens is None else f"{look.tokens:.0f} tokens sampled"
    rows = f"{look.row_tokens:.0f} with prompts and results" if look.row_tokens else ""
    sizes = ", ".join(part for part in (sampled, rows, f"{look.seconds:.1f} s") if part)
    waits = [f"{seconds:.1f} s of it waiting for {name}" for name, seconds in look.waits.items() if seconds >= 0.1]
    lines.append(f"a chain: {', '.join([sizes, *waits])}")
    return lines


def _calls(look: Look) -> str:
    own = f" ({look.own} of them the agent's own, or in its own code)" if look.own else ""
    told = [
        f"{look.called} of {look.chains} chains called a tool{own}",
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
        groups_of = f"{plural(groups, 'group')} of {look.compared}"
        return f"{told}; they differ in {teach} of {groups_of}; training compares {size}"
    rest = "" if teach == groups else ": the others would teach nothing" if teach else ": none would teach"
    return f"{told}; they differ in {teach} of {plural(groups, 'group')}{rest}"

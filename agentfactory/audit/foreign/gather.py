"""Groups, gathered from the chains of files in which those of several groups are mixed."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentfactory.audit.foreign.files import malformed, rows_of
from agentfactory.audit.record import Places, Seen
from agentfactory.base.errors import SettingError
from agentfactory.base.findings import Evidence, Finding, Severity
from agentfactory.rollout.trajectory import Group, Trajectory


def short_name(text: str) -> str:
    """Return a readable name for what may be named by a whole prompt; equal texts have equal names."""
    if len(text) <= 40 and text.isprintable():
        return text
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return f"{' '.join(text.split())[:24]}...{digest}"


@dataclass(frozen=True)
class Item:
    """A saved chain, and its group. `held_out`, `step` and `credit` are those of Seen."""

    group: str
    chain: Trajectory
    task: Mapping[str, Any] = field(default_factory=dict)
    held_out: str = ""
    step: int | None = None
    credit: Sequence[Mapping[str, Any]] = ()
    version: int = 0
    source: str = ""


@dataclass(frozen=True)
class Saved:
    """A saved line, or row of a table: its number, from 1, and its content."""

    file: Path
    number: int
    content: Any
    part: str = "line"


def saved_lines(files: Iterable[Path]) -> Iterator[Saved]:
    for file in files:
        for number, row in rows_of(file):
            yield Saved(file, number, row)


Pass = Callable[[], Iterator[Saved]]
"""Begins a new pass over everything saved, in order."""


class Gathered:
    """All groups of a run, read twice: once to check each chain and to count those of each group, and again for each
    pass over the groups, which keeps only incomplete ones. Raises SettingError if a chain cannot be read."""

    def __init__(self, folder: Path, saved: Pass, items: Callable[[Saved], Iterable[Item]]) -> None:
        self._folder, self._saved, self._items = folder, saved, items
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lines = 0
        self.chains = 0
        self.tokens = self.logprobs = self.credit = False
        """True if some chain has token ids, log-probabilities, the trainer's values of its tokens."""
        self._unreal = Places()
        for one in saved():
            self._lines += 1
            for item in self._read(one):
                self._note(one, item)
        modes = {bool(held_out) for held_out, _ in self._counts}
        self.alone = modes == {True}
        """True if all chains are of evaluations, which are then the run itself."""
        self.held_out = modes == {False, True}
        """True if there are evaluations beside training."""

    @property
    def size(self) -> int:
        return len(self._counts)

    def problems(self) -> list[Finding]:
        """Return what is wrong with the chains themselves."""
        if not self._unreal:
            return []
        text = f"{self._unreal.total} chains have a reward that is not a number"
        fix = "look at the reward function: one such value makes every advantage of its group NaN"
        return [Finding(Severity.WRONG, "rewards", text, fix, self._unreal.kept)]

    def groups(self) -> Iterator[Seen]:
        """Yield the groups, those of training first, each when its last chain was saved."""
        for held_out in (False, True) if self.held_out else (self.alone,):
            yield from self._pass(held_out)

    def _pass(self, held_out: bool) -> Iterator[Seen]:
        waiting: dict[tuple[str, str], list[tuple[Saved, Item]]] = {}
        for number, one in enumerate(self._saved(), 1):
            if number > self._lines:
                return  # written since they were counted
            for item in self._read(one):
                if bool(item.held_out) != held_out:
                    continue
                key = (item.held_out, item.group)
                members = waiting.setdefault(key, [])
                members.append((one, item))
                if len(members) == self._counts[key]:
                    yield self._seen(waiting.pop(key))

    def _seen(self, members: list[tuple[Saved, Item]]) -> Seen:
        saved, first = members[0]
        items = [item for _, item in members]
        chains = [item.chain for item in items]
        if len({chain.id for chain in chains}) < len(chains):
            for number, chain in enumerate(chains):
                chain.id = f"{first.group}.{number}"
        for chain in chains:
            if chain.reward is not None and not math.isfinite(chain.reward):
                chain.reward = None  # it is in problems()
        version = min(item.version for item in items)
        group = Group(first.group, dict(first.task), chains, version, first.source)
        if self.alone:
            return Seen(group, self._name(saved.file))
        step = next((item.step for item in items if item.step is not None), None)
        credit = {item.chain.id: item.credit for item in items if item.credit}
        return Seen(group, self._name(saved.file), first.held_out, step, credit)

    def _read(self, one: Saved) -> list[Item]:
        try:
            return list(self._items(one))
        except SettingError:
            raise
        # boundary: the forms that JSON can have
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise malformed(one.file, one.number, error, one.part) from error

    def _note(self, one: Saved, item: Item) -> None:
        chain = item.chain
        self.chains += 1
        self._counts[item.held_out, item.group] += 1
        self.tokens |= any(len(row.token_ids) > 0 for row in chain.rows)
        self.logprobs |= any(any(row.logprobs) for row in chain.rows)
        self.credit |= any("targets" in noted for noted in item.credit)
        if chain.reward is not None and not math.isfinite(chain.reward):
            self._unreal.add(Evidence(f"{chain.reward}", item.group, chain.id, file=self._name(one.file)))

    def _name(self, file: Path) -> str:
        return str(file.relative_to(self._folder)) if file.is_relative_to(self._folder) else file.name

"""Tasks: their order over the run and its resumes, and held-out tasks that are trained on."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from agentfactory.audit.check import Check
from agentfactory.audit.record import MESSAGES, ORDER, Places, Seen
from agentfactory.audit.reports import Unchecked
from agentfactory.audit.run_record import KIND
from agentfactory.base.errors import SettingError
from agentfactory.base.findings import Evidence, Finding
from agentfactory.base.messages import text_of
from agentfactory.rollout.data import Place, TaskMix
from agentfactory.rollout.sources import load_all, mix_of
from agentfactory.rollout.trajectory import Group

ENOUGH_GROUPS, FEW = 64, 0.05
"""Least number of groups, and the share of different tasks in them below which tasks count as repeated."""
ENOUGH_TRIES = 2
"""Groups of a task that are lost in a row."""
DISTINCT = 0.9
"""Share of different prompts among the training tasks from which an equal prompt is an equal task."""
_PREPARED = ("images", "messages")
"""Fields of a row that are changed on the way to its chains."""


class TaskCheck(Check):
    """Tasks must come in the recipe's order, each place once, also over resumes, and none of them be held out."""

    topic = "tasks"
    needs = (MESSAGES,)

    def begin(self) -> None:
        self._order: TaskMix | None = None
        self._tasks: list[Mapping[str, Any]] = []
        self._load()
        self._saved: Counter[str] = Counter()
        self._trained: dict[int, list[tuple[str, int]]] = {}
        self._rows: Counter[int] = Counter()
        self._lost: Counter[int] = Counter()
        """Row -> groups of it in which fewer than two chains have a reward."""
        self._other = Places()
        self._seen: Counter[bytes] = Counter()
        self._prompts: Counter[bytes] = Counter()
        self._held_out: dict[bytes, tuple[bytes, Evidence]] = {}

    def _load(self) -> None:
        recipe = self.record.recipe
        if recipe is None or ORDER in self.record.lacks:
            return
        if self.record.kind != KIND or recipe.train.algorithm == "sft" or recipe.data is None:
            return
        try:
            loaded = load_all(recipe.parts())
        except (SettingError, OSError, ValueError) as error:
            self.unchecked.append(Unchecked("order of the tasks", f"the data cannot be read here: {error}"))
            return
        self._order = mix_of(loaded, recipe.seed)
        self._tasks = [task for one in loaded for task in one.tasks]

    async def note(self, seen: Seen) -> None:
        group = seen.group
        task, prompt = _digest(group.task), _digest(_prompt(group))
        if seen.held_out:
            where = Evidence(json.dumps(group.task, ensure_ascii=False, default=repr)[:200], group.id, file=seen.file)
            self._held_out.setdefault(task, (prompt, where))
            return
        self._seen[task] += 1
        self._prompts[prompt] += 1
        try:
            place = Place.of(group.id)
        except ValueError:
            return
        if not seen.file.startswith("trajectories/train"):
            return  # `agentfactory rollout` takes the rows as they come
        self._saved[group.id] += 1
        if seen.step is not None:
            self._trained.setdefault(place.position, []).append((group.id, seen.step))
        if self._order is not None:
            number = self._order.number(place.position)
            self._rows[number] += 1
            self._lost[number] += sum(chain.reward is not None for chain in group.trajectories) < 2
            names = [n for n, value in self._tasks[number].items() if n not in _PREPARED and _is_plain(value)]
            mine, saved = _comparable(self._tasks[number], names), _comparable(group.task, names)
            if mine != saved:
                differing = sorted(key for key in names if mine[key] != saved[key])
                text = f"place {place.position} has row {number + 1} of the data, but its {differing[0]} differs"
                self._other.add(Evidence(text, group.id, file=seen.file))

    def findings(self) -> Iterator[Finding]:
        fix = (
            "look at what has changed since, or between the attempts: the data (a source that draws?), seed, shuffle, "
        )
        fix += "or the place at which they resumed"
        if places := self._other:
            text = f"{places.total} groups have another task than the recipe's data has at their place"
            yield self.wrong(text, fix, places.kept)
        again = [(place, found) for place, found in self._trained.items() if len({name for name, _ in found}) > 1]
        if again:
            shown = [Evidence(", ".join(f"{n} at step {s}" for n, s in found), found[0][0]) for _, found in again[:5]]
            yield self.wrong(f"{len(again)} places were trained twice", fix, shown)
        if twice := [name for name, count in self._saved.items() if count > 1]:
            yield self.wrong(f"{len(twice)} groups were saved twice", fix, [Evidence("", name) for name in twice[:5]])
        if skipped := self._skipped():
            shown = [Evidence("", Place(place).group_id) for place in skipped[:5]]
            text = f"{len(skipped)} places of {max(self._places()) + 1} were passed over: no group of theirs was saved"
            yield self.wrong(text, fix, shown)
        if starved := [row for row, count in self._lost.items() if count >= ENOUGH_TRIES and count == self._rows[row]]:
            text = f"all groups of {len(starved)} of {len(self._rows)} tasks were lost, {ENOUGH_TRIES} or more of each"
            rows = [Evidence(f"row {row + 1} of the data") for row in starved[:5]]
            yield self.warning(text, "look at the errors of their chains, or remove these rows", rows)
        groups = self._seen.total()
        different = len(self._seen)
        # the few rows of a small file come again and again
        if (
            groups >= ENOUGH_GROUPS
            and different < FEW * groups
            and (not self._tasks or 2 * different < len(self._tasks))
        ):
            text = f"only {different} different tasks in {groups:,} groups"
            yield self.warning(text, "look at the order of the data: the same rows come again and again")
        yield from self._overlap()

    def _places(self) -> set[int]:
        return {Place.of(name).position for name in self._saved}

    def _skipped(self) -> list[int]:
        """Return the places without a group, except the last ones, whose groups may have been running at the end."""
        recipe, places = self.record.recipe, self._places()
        if recipe is None or not places or recipe.rollout.curriculum is not None:
            return []
        if recipe.data is not None and recipe.data.curriculum is not None:
            return []
        running = recipe.train.batch_size * (recipe.rollout.max_staleness + 1)
        return sorted(set(range(max(places) - running)) - places)

    def _overlap(self) -> Iterator[Finding]:
        known = {_digest(task) for task in self._tasks} | self._seen.keys()
        same = [where for task, (_, where) in self._held_out.items() if task in known]
        if same:
            text = f"{len(same)} of {len(self._held_out)} held-out tasks are also training tasks"
            yield self.wrong(text, "hold out other rows or seeds: what was trained on measures nothing", same[:5])
        if len(self._prompts) >= DISTINCT * self._seen.total() and len(self._prompts) > 1:
            alike = [w for t, (prompt, w) in self._held_out.items() if t not in known and prompt in self._prompts]
            if alike:
                text = f"{len(alike)} of {len(self._held_out)} held-out tasks have the prompt of a training task"
                yield self.warning(text, "hold out other prompts, if they are meant to be new", alike[:5])

    def looked_at(self) -> str:
        held_out = f", {len(self._held_out):,} held-out tasks" if self._held_out else ""
        return f"{self._seen.total():,} groups of {len(self._seen):,} tasks{held_out}" if self._seen else ""


def _digest(value: Any) -> bytes:
    return blake2b(json.dumps(value, sort_keys=True, default=repr).encode(), digest_size=16).digest()


def _comparable(task: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: task.get(name) for name in names}


def _is_plain(value: Any) -> bool:
    """Return whether JSON keeps a value as it is; not so dates, images, and numbers that are not finite."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(inner) for name, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _prompt(group: Group) -> list[str]:
    """Return what the chains read before their first turn."""
    for chain in group.trajectories[:1]:
        said = [index for index, message in enumerate(chain.messages) if message["role"] == "assistant"]
        end = said[-chain.turns] if 0 < chain.turns <= len(said) else len(chain.messages)
        return [text_of(message.get("content") or "") for message in chain.messages[:end]]
    return []

"""The history of a run's weights: steps, trained groups, published versions. Part of every checkpoint."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

_NUMBERED = re.compile(r"(.*?)(\d+)", re.DOTALL)


@dataclass
class TrainState:
    """The history of the weights, over all processes and attempts of a run."""

    step: int = 0
    """Number of finished steps; also the version of the weights."""
    seconds: float = 0.0
    """Time spent in these steps."""
    trained: set[str] = field(default_factory=set)
    """Ids of all groups that were trained (rank 0)."""
    groups: list[str] = field(default_factory=list)
    """Ids of trained groups that no earlier checkpoint includes."""
    labels: dict[str, int] = field(default_factory=dict)
    """The servers' labels of the versions; see agentfactory.rollout.inference.weight_versions.WeightVersions."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of the last step."""
    before: dict[str, float] = field(default_factory=dict)
    """Evaluation of the initial weights."""
    after: dict[str, float] = field(default_factory=dict)
    """The latest evaluation."""
    evaluated: int | None = None
    """The step of the latest evaluation."""
    best: float | None = None
    """The highest evaluation of the metric that `train.keep_best` names, since the first step."""

    def finish(self, step: int, groups: list[str], seconds: float) -> None:
        """Note that `step` is finished and has trained `groups`."""
        self.step = step
        self.seconds += seconds
        self.groups += groups
        self.trained.update(groups)

    def note_evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Note an evaluation of the weights of `step`."""
        self.evaluated = step
        self.after = figures
        if step == 0:
            self.before = figures
        self.metrics |= figures

    def take_groups(self) -> list[str]:
        """Return, once, the ids of groups trained since the previous call."""
        groups, self.groups = self.groups, []
        return groups

    def to_json(self) -> dict[str, Any]:
        """Return the data for `trainer_state.json`."""
        return {**asdict(self), "trained": compact(self.trained), "version": self.step}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TrainState":
        """Invert `to_json`; ignore other keys. `groups` is empty: an earlier checkpoint includes them."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        return cls(**{**known, "trained": set(expand(data["trained"])), "groups": []})


def compact(ids: Iterable[str]) -> list[list[str]]:
    """Compact ids to ranges [first, last] of ids that differ only in a number at their end, which increases without a
    gap."""
    ranges: list[list[str]] = []
    after: str | None = None
    for prefix, digits in sorted(map(_split, ids), key=lambda parts: (parts[0], len(parts[1]), parts[1])):
        name = prefix + digits
        if name == after:
            ranges[-1][1] = name
        else:
            ranges.append([name, name])
        after = f"{prefix}{int(digits) + 1:0{len(digits)}d}" if digits else None
    return ranges


def expand(ranges: list[list[str]]) -> list[str]:
    """Invert `compact`."""
    ids: list[str] = []
    for first, last in ranges:
        prefix, digits = _split(first)
        if first == last:
            ids.append(first)
        else:
            end = int(_split(last)[1]) + 1
            ids += [f"{prefix}{number:0{len(digits)}d}" for number in range(int(digits), end)]
    return ids


def _split(name: str) -> tuple[str, str]:
    """Split `name` into the part before the number at its end, and the number."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], match[2]) if match else (name, "")

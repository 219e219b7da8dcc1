"""What led to a run's weights: steps, the groups that were trained, published versions. A checkpoint carries it."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

_NUMBERED = re.compile(r"(.*?)(\d+)", re.DOTALL)


@dataclass
class TrainState:
    """The history of the weights, over all processes and attempts of a run."""

    step: int = 0
    """Steps finished; also the version of the weights."""
    seconds: float = 0.0
    """Time in these steps."""
    trained: set[str] = field(default_factory=set)
    """Ids of all groups that were trained (rank 0)."""
    groups: list[str] = field(default_factory=list)
    """Those of them that no checkpoint held before."""
    labels: dict[str, int] = field(default_factory=dict)
    """What servers call the versions; see agentfactory.rollout.weight_versions.WeightVersions."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Figures of the last step."""
    before: dict[str, float] = field(default_factory=dict)
    """Evaluation of the first weights."""
    after: dict[str, float] = field(default_factory=dict)
    """The latest evaluation."""
    evaluated: int | None = None
    """The step of the latest evaluation."""
    best: float | None = None
    """The best figure of an evaluation, by `train.keep_best`, since the first step."""

    def finish(self, step: int, groups: list[str], seconds: float) -> None:
        """`step` is done, and has trained `groups`."""
        self.step = step
        self.seconds += seconds
        self.groups += groups
        self.trained.update(groups)

    def note_evaluation(self, step: int, figures: dict[str, float]) -> None:
        """The weights of `step` were evaluated."""
        self.evaluated = step
        self.after = figures
        if step == 0:
            self.before = figures
        self.metrics |= figures

    def take_groups(self) -> list[str]:
        """The groups that a checkpoint has just made durable, once."""
        groups, self.groups = self.groups, []
        return groups

    def to_json(self) -> dict[str, Any]:
        """For `trainer_state.json`."""
        return {**asdict(self), "trained": compact(self.trained), "version": self.step}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TrainState":
        """The inverse of `to_json`; other keys are passed over. The groups are those of an earlier checkpoint."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        return cls(**{**known, "trained": set(expand(data["trained"])), "groups": []})


def compact(ids: Iterable[str]) -> list[list[str]]:
    """Ids as ranges [first, last]: those that differ in a number at their end, which counts up without a gap."""
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
    """The inverse of `compact`."""
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
    """`name` without and with the number at its end."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], match[2]) if match else (name, "")

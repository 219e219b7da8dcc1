"""Record of a run: its groups, metrics and recipe, in the same form for every kind of run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentfactory.base.findings import Evidence, Finding
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.trajectory import Group

READ = "its files"
"""Topic of findings about files that cannot be read."""
MOST_EVIDENCE = 5
"""Places of a finding that are kept; the text has the number of all."""

TOKENS = "tokens"
LOGPROBS = "log-probabilities"
TRAINED = "trained tokens"
"""The step of each trained group, with the advantage and the trainer's log-probability of each token."""
MESSAGES = "messages"
REWARDS = "rewards"
METRICS = "metrics"
ORDER = "order of the tasks"
"""Positions of the groups in the order of the tasks."""
RECIPE = "recipe"
"""A recipe of ours, whose tools, rewards and chat template can be loaded."""
HELD_OUT = "held-out chains"
CALLS = "tool calls"
"""Calls and their results, as messages of their own."""
MALFORMED = "unreadable turns"
OUTCOMES = "ends of the chains"
"""Kinds of end: a chain failed, or reached a limit."""


@dataclass(frozen=True)
class Seen:
    """A saved group. `held_out` is the mode of an evaluation (`sampled` or `greedy`), empty for training. `step` is the
    step that trained it, or before which it was evaluated; None: not trained. `credit` has, by chain, what the trainer
    noted about the tokens of its rows: `row`, `targets`, `advantage`, `proximal`."""

    group: Group
    file: str
    held_out: str = ""
    step: int | None = None
    credit: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


@dataclass
class Record:
    """A run to audit. `groups` begins a new pass over all saved groups, those of training first, in the order in which
    they ended; `size` is their number, as far as it is known. `labels` has the version of each label of weights, and
    `trained` the number of groups that each step trained. `lacks` says of each stream (TOKENS, ...) that this kind of
    run does not have, why. `problems` are found while its files are read."""

    name: str
    kind: str
    folder: Path
    groups: Callable[[], Iterator[Seen]]
    size: int = 0
    metrics: Sequence[Mapping[str, Any]] = ()
    recipe: Recipe | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, int] = field(default_factory=dict)
    trained: Mapping[int, int] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    problems: list[Finding] = field(default_factory=list)


@dataclass
class Places:
    """Evidence as it is found: the first MOST_EVIDENCE places, and the number of all."""

    total: int = 0
    kept: list[Evidence] = field(default_factory=list)

    def add(self, evidence: Evidence) -> None:
        self.total += 1
        if len(self.kept) < MOST_EVIDENCE:
            self.kept.append(evidence)

    def __bool__(self) -> bool:
        return self.total > 0

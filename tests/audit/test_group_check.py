"""Advantages of groups: those that the trainer's rules give are healthy, others are not."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentfactory.audit.checks.groups import GroupCheck
from agentfactory.audit.record import Record, Seen
from agentfactory.base.findings import Finding
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.loop.token_advantages import Credit

Change = Callable[[list[float]], list[float]]


def recipe_of(train: dict[str, Any], rollout: dict[str, Any]) -> Recipe:
    sections = {"name": "run", "output": "run", "model": {"path": "model"}, "rewards": ["exact_match"]}
    sections |= {"data": {"path": "data.jsonl"}}
    return Recipe.model_validate({**sections, "train": {"steps": 1, **train}, "rollout": rollout})


def chain(
    name: str, reward: float, malformed: bool = False, outcome: Outcome = Outcome.COMPLETED, turns: int = 2
) -> Trajectory:
    """A chain of turns of 2 tokens; the first of them may be malformed."""
    row = Row()
    for _ in range(turns):
        row.append_context([1, 2])
        row.append_sampled([4 + ord(name), 4], [-1.0, -1.0], [Span("0", 0, 2)])
    made = Trajectory(name, [], [row], outcome, reward, turns=turns)
    made.malformed_turns = [0] if malformed else []
    return made


def findings(recipe: Recipe, group: Group, change: Change = lambda values: values) -> list[Finding]:
    """Return the findings of the check for a group with the trainer's credit, after `change` of each row's
    advantages."""
    credit = Credit([group], recipe)
    rows = credit.rows
    for number, row in enumerate(rows):
        row.streams["entropy"] = np.linspace(0.1, 0.9, len(row.targets)) + number / 100
    (line,) = credit.lines(1, credit.assign(rows).rows)
    noted = json.loads(line)["chains"]
    for row in (row for rows_of in noted.values() for row in rows_of):
        row["advantage"] = change(row["advantage"])
    record = Record("run", "ours", Path(), lambda: iter(()), recipe=recipe)
    check = GroupCheck(record, {})
    asyncio.run(check.note(Seen(group, "train.jsonl", step=1, credit=noted)))
    assert "advantages of" in check.looked_at()
    return list(check.findings())


def chains(*rewards: float) -> list[Trajectory]:
    return [chain(name, reward) for name, reward in zip("abc", rewards, strict=False)]


def scaled(scale: str) -> dict[str, Any]:
    return {"advantage": {"options": {"scale": scale}}}


RAFT = {"algorithm": "raft"}
LONG = chain("a", 1.0, turns=4)
MALFORMED = [chain("a", 1.0, malformed=True), *chains(0.0, 0.0, 0.5)[1:]]
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], list[Trajectory]]] = {
    "grpo": ({}, {}, chains(1.0, 0.0, 0.5)),
    "without division": (scaled("none"), {}, chains(1.0, 0.0, 1.0)),
    "rloo": ({"algorithm": "rloo"}, {}, chains(1.0, 0.0, 0.0)),
    "the most uncertain tokens": ({"loss": {"top_entropy": 0.25}}, {}, chains(1.0, 0.0)),
    "raft": (RAFT, {}, chains(1.0, 0.0)),
    "raft, the best is masked": (
        RAFT,
        {"on_outcome": {"max_turns": "mask"}},
        [chain("a", 1.0, outcome=Outcome.MAX_TURNS), *chains(0.0, 0.0, 0.5)[1:]],
    ),
    "a malformed turn": ({}, {}, MALFORMED),
    "nearly equal rewards": (scaled("none"), {}, chains(1.0, 1.0 + 5e-6)),
    "overlong chains": ({"overlong": {"buffer": 4}}, {"max_total_tokens": 10}, chains(1.0, 0.0, 0.5)),
    "overlong chains of reinforce_pp_baseline": (
        {"overlong": {"buffer": 8, "penalty": 1.0}, "algorithm": "reinforce_pp_baseline"},
        {"max_total_tokens": 16},
        [LONG, chain("b", 0.0, turns=1), chain("c", 0.0)],
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_trainers_own_advantages_are_healthy(name: str) -> None:
    train, rollout, members = SETTINGS[name]
    assert findings(recipe_of(train, rollout), Group("g000000", {}, members)) == []


FAULTS: dict[str, Change] = {
    "turned": lambda values: [-value for value in values],
    "moved": lambda values: [value + 0.1 for value in values],
    "scaled": lambda values: [1.01 * value for value in values],
    "first token": lambda values: [values[0] + 1.0, *values[1:]],
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if not name.startswith(("nearly", "raft, the best is mas", "overlong chains o"))]
)
def test_other_advantages_are_wrong(name: str, fault: str) -> None:
    train, rollout, members = SETTINGS[name]
    (first, *_) = findings(recipe_of(train, rollout), Group("g000000", {}, members), FAULTS[fault])
    assert first.topic == "groups"
    assert "advantage" in first.text
    assert first.evidence

"""Admission and batch selection: how far generation may run ahead, and the handling of stale groups."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfactory.rollout.config import EqualRewards, LateChains
from agentfactory.rollout.groups.staleness import Admission, BatchChoice, Candidate, Choice


def start_all(admission: Admission) -> int:
    before = admission.started
    while admission.may_start():
        admission.start()
    return admission.started - before


@pytest.mark.parametrize("k", [1, 2, 4])
def test_generation_runs_k_batches_ahead(k: int) -> None:
    admission = Admission(batch_size=3, max_staleness=k, total=1000)
    assert start_all(admission) == (k + 1) * 3
    admission.publish(1)
    assert start_all(admission) == 3


def choice(batch_size: int, max_staleness: int, late: LateChains = LateChains.DROP, version: int = 0) -> BatchChoice:
    return BatchChoice(Admission(batch_size, max_staleness, total=1000, version=version), late)


def candidate(name: str, oldest: int | None = 0, chains: int = 2) -> Candidate:
    return Candidate(name, oldest, True, chains, teaches=True)


def running(name: str, oldest: int | None = 0, chains: int = 0, teaches: bool | None = None) -> Candidate:
    return Candidate(name, oldest, False, chains, teaches=chains >= 2 if teaches is None else teaches)


def test_an_old_group_is_closed_with_the_chains_that_have_ended() -> None:
    batches = choice(2, 1, late=LateChains.DROP)
    groups = [running("old", 0, 2), candidate("young", 1), candidate("younger", 1)]
    assert batches.choose(groups) == Choice(["young", "younger"], []), "at version 0 there is time until version 1"
    batches.admission.publish(1)
    assert batches.choose(groups) == Choice(["old", "young"], [])


@pytest.mark.parametrize("chains", [0, 1, 3])
def test_an_old_group_that_would_teach_nothing_is_cancelled(chains: int) -> None:
    batches = choice(2, 0, late=LateChains.DROP)
    groups = [running("old", 0, chains, teaches=False), candidate("a"), candidate("b")]
    assert batches.choose(groups) == Choice(["a", "b"], ["old"])


def test_places_that_stay_empty_are_those_of_the_next_batch_and_never_all() -> None:
    batches = choice(3, 1)
    assert batches.choose([candidate("a")]) is None
    assert [batches.leave_empty() for _ in range(3)] == [True, True, False]
    assert batches.choose([candidate("a"), candidate("b")]) == Choice(["a"], [])
    batches.admission.publish(1)
    assert batches.choose([candidate("b"), candidate("c", 1)]) is None, "the batch after it has all its places"
    assert batches.leave_empty()
    assert batches.choose([candidate("b"), candidate("c", 1)]) == Choice(["b", "c"], [])


def test_the_oldest_go_first_and_of_those_closed_the_fullest() -> None:
    batches = choice(3, 2, version=5, late=LateChains.DROP)
    groups = [
        running("two", 3, 2),
        running("three", 3, 3),
        candidate("newer", 5),
        candidate("whole", 3),
        candidate("middle", 4),
        running("unborn", None),
    ]
    assert batches.choose(groups) == Choice(["whole", "three", "two"], [])
    batches = choice(2, 2, version=5, late=LateChains.DROP)
    assert batches.choose(groups) == Choice(["whole", "three"], ["two"])
    batches = choice(3, 4, version=5, late=LateChains.DROP)
    assert batches.choose(groups) == Choice(["whole", "middle", "newer"], [])


def test_a_batch_waits_for_a_group_on_its_last_chance() -> None:
    batches = choice(2, 2, late=LateChains.WAIT)
    # four more groups have their last chance at version 2: two of them must be in this batch or the next
    slow = [running("slow", 0), running("slower", 0)]
    quick = [candidate("a"), candidate("b"), candidate("c"), candidate("d")]
    assert batches.choose([*slow, *quick]) == Choice(["a", "b"], [])
    batches.admission.publish(1)
    young = [candidate("e", 1), candidate("f", 1)]
    assert batches.choose([*slow, *quick[2:], *young]) == Choice(["c", "d"], [])
    batches.admission.publish(2)
    young += [candidate("g", 2), candidate("h", 2)]
    assert batches.choose([*slow, *young]) is None
    assert batches.choose([slow[0], candidate("slower", 0), *young]) is None
    assert batches.choose([candidate("slow", 0), candidate("slower", 0), *young]) == Choice(["slow", "slower"], [])


def test_more_groups_than_places_on_their_last_chance_do_not_stop_a_run() -> None:
    batches = choice(1, 1, version=1, late=LateChains.WAIT)
    assert batches.choose([candidate("a", 0), candidate("b", 0), running("c", 0)]) == Choice(["a"], ["b"])


def test_a_late_group_is_trained_when_it_is_complete_unless_all_its_tokens_are_too_old() -> None:
    batches = choice(1, 1, version=4, late=LateChains.BASELINE)
    late, young = running("late", 2, 3), Candidate("young", 4, True, 2, True, newest=4)
    assert batches.choose([late, young]) == Choice(["young"], [])
    batches.admission.publish(5)
    young = Candidate("younger", 4, True, 2, True, newest=5)
    assert batches.choose([Candidate("late", 2, True, 4, True, newest=4), young]) == Choice(["late"], [])
    batches.admission.publish(6)
    stale = Candidate("stale", 2, True, 4, True, newest=4)
    assert batches.choose([stale, running("c", 6)]) == Choice([], ["stale"])
    assert batches.choose([running("c", 6)]) is None
    assert batches.choose([stale, young]) == Choice(["younger"], ["stale"])


class Run:
    """Rollouts and a trainer, played step by step without time: what may happen next is drawn at random. A complete
    group of equal rewards is kept, or its place stays empty or is filled again."""

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        steps: int,
        group_size: int,
        equal: EqualRewards = EqualRewards.KEEP,
        late: LateChains = LateChains.WAIT,
    ):
        self.admission = Admission(batch_size, max_staleness, total=steps * batch_size)
        self.batches = BatchChoice(self.admission, late)
        self.steps, self.group_size, self.equal = steps, group_size, equal
        self.empty: list[int] = []
        """Places of each trained batch that stayed empty."""
        self.open: dict[str, list[Any]] = {}
        self.serial = 0
        self.trained: list[list[int]] = []
        """The ages of each batch's groups: of their newest tokens if late groups stay open, else of their oldest."""
        self.cut = self.cancelled = 0
        """Numbers of groups that were trained without all their chains, and that were cancelled."""

    def act(self, draw: random.Random) -> None:
        while self.admission.may_start():
            self.admission.start()
            self.open[str(self.serial)] = [None, 0, (), None]
            self.serial += 1
        version = self.admission.version
        for _ in range(draw.randint(1, 8)):
            if alive := [group for group in self.open.values() if group[1] < self.group_size]:
                group = draw.choice(alive)
                group[0], group[3] = version if group[0] is None else group[0], version
                if draw.random() < 0.7:
                    group[1] += 1
                    group[2] = (*group[2], float(draw.random() < 0.5))
                    self.filter(group)
        empty = self.batches.empty
        choice = self.batches.choose(
            [
                Candidate(n, oldest, ended == self.group_size, len(r), len(set(r)) > 1, newest)
                for n, (oldest, ended, r, newest) in self.open.items()
            ]
        )
        if choice is not None:
            late = self.batches.late
            assert not set(choice.train) & set(choice.cancel)
            if choice.train:
                assert self.admission.batch_size - empty <= len(choice.train) <= self.admission.batch_size
                assert len(choice.train) == self.admission.batch_size - empty or late is LateChains.WAIT
                self.empty.append(self.admission.batch_size - len(choice.train))
                groups = [self.open.pop(name) for name in choice.train]
                self.trained.append([version - group[3 if late is LateChains.BASELINE else 0] for group in groups])
                self.cut += sum(group[1] < self.group_size for group in groups)
            self.cancelled += len(choice.cancel)
            for name in choice.cancel:
                del self.open[name]
                self.admission.dropped()
        if self.batches.chosen > version and version + 1 < self.steps and draw.random() < 0.5:
            self.admission.publish(version + 1)

    def filter(self, group: list[Any]) -> None:
        if group[1] == self.group_size and len(set(group[2])) == 1 and self.equal is not EqualRewards.KEEP:
            self.open = {name: other for name, other in self.open.items() if other is not group}
            if self.equal is EqualRewards.REFILL or not self.batches.leave_empty():
                self.admission.dropped()


@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    group_size=st.integers(2, 4),
    equal=st.sampled_from(EqualRewards),
    late=st.sampled_from(LateChains),
)
def test_nothing_older_than_the_bound_is_trained_and_no_run_gets_stuck(
    seed: int, batch_size: int, max_staleness: int, group_size: int, equal: EqualRewards, late: LateChains
) -> None:
    run, draw = Run(batch_size, max_staleness, 8, group_size, equal, late), random.Random(seed)
    for _ in range(2000):
        run.act(draw)
        if len(run.trained) == run.steps:
            break
    assert len(run.trained) == run.steps
    assert all(0 <= age <= max_staleness for ages in run.trained for age in ages)
    assert run.open == {}, "exactly as many groups are started as are trained"
    assert sum(run.empty) == 0 or equal is EqualRewards.DROP
    assert run.cut == 0 or late is LateChains.DROP
    assert run.cancelled == 0 or late is not LateChains.WAIT
    assert len(run.trained) * batch_size == sum(map(len, run.trained)) + sum(run.empty)

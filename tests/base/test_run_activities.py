"""A user who has read nothing for some seconds is told what the process is doing."""

import pytest

from agentfactory.base import run_notices
from agentfactory.base.run_notices import counted, current, doing, heard
from agentfactory.rollout.chains.chain_counts import ChainCounts, describe_progress
from agentfactory.rollout.config import RolloutConfig
from tests.waiting import wait_for


def test_the_innermost_activity_is_told_after_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_notices, "QUIET_SECONDS", 0.05)
    said: list[str] = []
    with heard(said.append) as say:
        say("a line")
        with doing("loading"), doing(lambda seconds: f"half of it after {seconds > 0}"):
            wait_for(lambda: len(said) > 2)
        with doing("loading"):
            wait_for(lambda: said[-1] == "loading, 0 s so far")
        count = len(said)
    assert said[:3] == ["a line", "half of it after True", "half of it after True"]
    with doing("later"):
        pass
    assert len(said) == count
    assert current() == ""


def test_an_activity_that_has_just_begun_is_not_told() -> None:
    with doing("training"):
        run_notices._activities[-1].began -= 60.0
        with doing("updating"):
            assert current() == "updating, 0 s so far"
            assert current(6.0) == "training, 60 s so far"
        assert current(90.0) == ""


def test_parts_are_counted() -> None:
    shown = [current() for _ in counted("updating", "micro-batches", range(2))]
    assert shown == [f"updating: {done} of 2 micro-batches done, 0 s so far" for done in range(2)]


def test_the_seconds_left_follow_chains_and_before_that_tokens() -> None:
    counts = ChainCounts(asked=9, begun=9, ended=8, turns=20, tokens=500, served=700.0)
    describe = describe_progress(lambda: counts, RolloutConfig(max_turns=2, max_tokens=50))
    # one chain ran before; three more were asked for, of at most 100 tokens each
    counts.asked, counts.begun, counts.served = 12, 11, 800.0
    assert describe(25.0) == "sampling: 3 of 4 chains begun, 0 ended, 0 turns, 4.0 tokens/s, at most 75 s left"
    counts.ended, counts.turns, counts.tokens = 10, 23, 650
    assert describe(50.0) == "sampling: 3 of 4 chains begun, 2 ended, 3 turns, 3.0 tokens/s, about 50 s left"
    assert describe_progress(lambda: ChainCounts(), RolloutConfig())(9.0) == "waiting for the first chain, 9 s so far"

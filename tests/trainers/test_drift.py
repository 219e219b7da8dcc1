"""The canary's verdict as a pure state machine: synthetic scores of servers that follow, stay stale or diverge."""

import numpy as np
import pytest

from agentfactory.trainers.sync.canary_verdict import Drift, Verdict

NOISE = 0.01
CONTEXTS, TOKENS = 8, 128


class Scorer:
    """Noisy scores, the noise between two of the same weights being NOISE."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(0)
        self.base = self.draw.normal(-5.0, 1.0, TOKENS)
        self.direction = self.draw.normal(0.0, 1.0, TOKENS)

    def at(self, moved: float) -> np.ndarray:
        return self.base + moved * self.direction + self.draw.normal(0.0, NOISE / 2**0.5, TOKENS)


@pytest.fixture
def scorer() -> Scorer:
    return Scorer()


def begun(scorer: Scorer) -> Drift:
    drift = Drift("bfloat16", CONTEXTS)
    verdict = drift.start(scorer.at(0), scorer.at(0), scorer.at(0))
    assert verdict.failure is None
    assert not verdict.provable
    assert drift.noise == pytest.approx(NOISE, rel=0.3)
    return drift


def first_failure(verdicts: list[Verdict]) -> int | None:
    return next((version for version, verdict in enumerate(verdicts, 1) if verdict.failure), None)


def test_a_server_that_follows_is_proven_again_and_again(scorer: Scorer) -> None:
    drift = begun(scorer)
    verdicts = [drift.judge(*(scorer.at(0.005 * version) for _ in range(3))) for version in range(1, 101)]
    assert first_failure(verdicts) is None
    proven = [verdict for verdict in verdicts if verdict.provable]
    # 0.03 nats of drift take about six versions, and the count restarts with each proof
    assert 10 <= len(proven) <= 20
    assert all(0.7 < verdict.slope < 1.3 for verdict in proven if verdict.slope is not None)
    assert all(verdict.slope is None for verdict in verdicts if not verdict.provable)


@pytest.mark.parametrize(("followed", "reason"), [(0.0, "by 0"), (0.3, r"by 0\.[23]"), (2.0, r"by (1\.9|2)")])
def test_too_little_or_too_much_is_found_once_provable(scorer: Scorer, followed: float, reason: str) -> None:
    drift = begun(scorer)
    moves = [0.005 * version for version in range(1, 11)]
    verdicts = [drift.judge(*(scorer.at(followed * moved) for _ in "ab"), scorer.at(moved)) for moved in moves]
    caught = first_failure(verdicts)
    assert 5 <= caught <= 8
    assert "serves other weights" in (verdicts[caught - 1].failure or "")
    assert [verdict.provable for verdict in verdicts[:caught]] == [False] * (caught - 1) + [True]


def test_other_weights_and_stale_caches_are_found(scorer: Scorer) -> None:
    # without any drift of the trainer
    verdict = begun(scorer).judge(scorer.at(0.3), scorer.at(0.3), scorer.at(0.0))
    assert not verdict.provable
    assert "moved 0.3" in (verdict.failure or "")
    drift = begun(scorer)
    assert drift.judge(scorer.at(0.02), scorer.at(0.02), scorer.at(0.02)).failure is None
    verdict = drift.judge(scorer.at(0.06), scorer.at(0.1), scorer.at(0.1))
    assert "caches of older weights" in (verdict.failure or "")


def test_what_is_not_a_number_and_another_model_never_pass(scorer: Scorer) -> None:
    verdict = Drift("float32", CONTEXTS).start(scorer.at(0), scorer.at(0), scorer.at(2.0))
    assert "serves another model" in (verdict.failure or "")
    broken = scorer.at(0) * np.nan
    assert Drift("float32", CONTEXTS).start(broken, broken, scorer.at(0)).failure
    assert begun(scorer).judge(broken, broken, scorer.at(0)).failure
    assert begun(scorer).judge(scorer.at(0), scorer.at(0), broken).failure
    assert begun(scorer).judge_again(broken).failure


def test_after_a_restart_the_latest_version_must_score_as_before(scorer: Scorer) -> None:
    drift = begun(scorer)
    drift.judge(*(scorer.at(0.5) for _ in range(3)))
    assert drift.judge_again(scorer.at(0.5)).failure is None
    assert "with which it proved this version" in (drift.judge_again(scorer.at(0.0)).failure or "")
    # the proof of version 1 still counts
    assert drift.judge(*(scorer.at(0.6) for _ in range(3))).slope == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("followed", [1.0, 0.0])
def test_contexts_of_rounding_hide_neither_a_healthy_server_nor_a_lost_adapter(scorer: Scorer, followed: float) -> None:
    """As measured with a four-bit server: in two of eight contexts, the server's changes are many times the others',
    and unrelated to the trainer's."""
    strays = np.repeat([30.0, -20.0, 0, 0, 0, 0, 0, 0], TOKENS // CONTEXTS)

    def served(moved: float) -> np.ndarray:
        return scorer.at(followed * moved) + followed * moved * strays * scorer.draw.normal(0.0, 1.0, TOKENS)

    drift = Drift("bfloat16", CONTEXTS, rounded=True)
    offset = 20 * NOISE * np.repeat([1.0, 1.0, 0, 0, 0, 0, 0, 0], TOKENS // CONTEXTS)
    assert drift.start(scorer.at(0) + offset, scorer.at(0) + offset, scorer.at(0)).failure is None
    verdicts = []
    for version in range(1, 31):
        scores = served(0.005 * version) + offset
        verdicts.append(drift.judge(scores, scores, scorer.at(0.005 * version)))
    if followed:
        assert first_failure(verdicts) is None
        assert sum(verdict.provable for verdict in verdicts) >= 3
    else:
        assert first_failure(verdicts) in range(5, 10)


@pytest.mark.parametrize("stale", [1, 3])
def test_contexts_that_stand_still_are_found_once_it_is_twenty_times_the_noise(scorer: Scorer, stale: int) -> None:
    """Like one of several servers behind one address that missed an update."""
    still = np.repeat(np.arange(CONTEXTS) < stale, TOKENS // CONTEXTS)
    drift = begun(scorer)

    def served(moved: float) -> np.ndarray:
        return np.where(still, scorer.at(0), scorer.at(moved))

    assert drift.judge(served(10 * NOISE), served(10 * NOISE), scorer.at(10 * NOISE)).failure is None
    drift = begun(scorer)
    verdict = drift.judge(served(30 * NOISE), served(30 * NOISE), scorer.at(30 * NOISE))
    assert "away from the trainer's" in (verdict.failure or "")

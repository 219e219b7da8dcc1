"""Checkpoints by the real SDK: resumed with and without the optimizer's state, listed, replaced, deleted, expiring."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.tinker.service import Service


@pytest.fixture(scope="module")
def result(running: Service) -> Callable[[str], Any]:
    return running.cases("checkpoints.py")


def test_a_resumed_model_goes_on_as_the_live_one(result: Callable[[str], Any]) -> None:
    live, resumed, fresh, scores, trained = result("resume")
    assert resumed == live, "bit-equal with the optimizer's state"
    assert fresh[0] == live[0]
    assert fresh[1:] != live[1:], "another step without it"
    assert scores == pytest.approx(trained, abs=1e-4), "a sampler from saved weights"


def test_checkpoints_runs_and_sessions_are_listed(result: Callable[[str], Any]) -> None:
    found = result("listings")
    assert ["weights/third", "training"] in found["checkpoints"]
    assert ["sampler_weights/third", "sampler"] in found["checkpoints"]
    assert found["bytes"] > 1000
    assert found["run"] == [True, True, 8, {"team": "tests"}]
    assert found["weights"] == [True, True, 8]
    assert [found[name] for name in ("runs", "users", "session", "sessions")] == [True] * 4


def test_a_deleted_checkpoint_is_gone(result: Callable[[str], Any]) -> None:
    found = result("deletion")
    assert (found["before"], found["after"], found["other"]) == (True, False, True)
    assert "weights/short" in found["error"]["text"]


def test_a_checkpoint_is_kept_as_long_as_set(result: Callable[[str], Any]) -> None:
    saved, changed, unset = result("expiry")
    assert saved == pytest.approx(2, abs=0.1)
    assert changed == pytest.approx(10, abs=0.1)
    assert unset is None


def test_a_name_is_replaced_only_when_asked(result: Callable[[str], Any]) -> None:
    error, before, live, resumed = result("overwriting")
    assert "again" in error["text"]
    assert "overwrite" in error["text"]
    assert resumed == live < before

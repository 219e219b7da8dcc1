"""Tests of notices: shown to the user once, and again at the end with their count."""

import logging

import pytest

from agentfactory.base.run_notices import notify
from agentfactory.launching.progress import tell_warnings

logger = logging.getLogger("agentfactory")


def run(said: list[str]) -> None:
    with tell_warnings(said.append):
        for died in ("call 3", "call 9", "call 12"):
            notify(logger, "tool server search", f"tool server search was restarted at {died}", see="logs/worker.log")
        for lost in (4, 80):
            notify(logger, "lost chains", f"{lost} of 128 chains are lost", times=0)
        logger.warning("some other warning")
        said.append("a step")
        raise InterruptedError


def test_a_notice_is_shown_once_and_again_at_the_end_with_its_count() -> None:
    said: list[str] = []
    with pytest.raises(InterruptedError):
        run(said)
    assert said == [
        "warning: tool server search was restarted at call 3; see logs/worker.log",
        "warning: 4 of 128 chains are lost",
        "warning: some other warning",
        "a step",
        "warnings of this run:\n"
        "  tool server search was restarted at call 12; see logs/worker.log (3 times)\n"
        "  80 of 128 chains are lost",
    ]


def test_a_run_without_a_notice_ends_without_a_list() -> None:
    said: list[str] = []
    with tell_warnings(said.append):
        logger.warning("some other warning")
    assert said == ["warning: some other warning"]

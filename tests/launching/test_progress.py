"""What a person sees while a run goes on, and the curve that is left."""

import io
import json
import logging
from contextlib import closing, suppress
from pathlib import Path

import pytest
from rich.console import Console

from agentfactory.base.run_notices import notify
from agentfactory.launching.progress import Progress, tell_warnings
from agentfactory.launching.run_results import conclude, draw_curve

STEP = {"step": 1, "reward": 0.25, "success": 0.125, "turns": 5.0, "entropy": 1.5, "tokens_per_second": 1234.5}
STEP["seconds/step"] = 90.0


def test_plain_lines_without_a_terminal() -> None:
    out = io.StringIO()
    with closing(Progress(2, "grpo", Console(file=out, width=60))) as progress:
        progress.update(
            {"step": 0, "eval/sampled/success": 0.05, "eval/sampled/reward": 0.3, "eval/greedy/success": 0.0}
        )
        progress.update(STEP)
        progress.note("hello")
        progress.update({**STEP, "step": 2, "success": 0.5})
    lines = out.getvalue().splitlines()
    assert lines[0] == "held-out tasks after step 0: sampled success 0.050, greedy success 0.000"
    assert lines[1].startswith("step 1/2  reward 0.250  success 0.12  turns 5.0  entropy 1.50  1,234 tokens/s")
    assert lines[1].endswith("1:30 left")
    assert lines[2] == "hello"
    assert lines[3].startswith("step 2/2")
    assert lines[3].endswith("0:00 left")
    assert "\x1b" not in out.getvalue()


def test_a_table_and_a_bar_on_a_terminal() -> None:
    out = io.StringIO()
    with closing(Progress(2, "grpo", Console(file=out, force_terminal=True, width=100, height=30))) as progress:
        progress.update(STEP)
    text = out.getvalue()
    assert "reward" in text
    assert "1,234" in text
    assert "1/2" in text
    # the cursor is back
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.slow
def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    rows = [{"step": 0, "eval/sampled/success": 0.1, "eval/greedy/success": 0.0}]
    rows += [{"step": step, "reward": step / 10, "success": step / 20} for step in range(1, 11)]
    path = draw_curve(json.loads(json.dumps(rows)), tmp_path / "curve.png", "run")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw_curve([{"step": 1, "loss": 2.0}], tmp_path / "loss.png", "run") is not None
    assert draw_curve([{"step": 0, "eval/reward": 1.0}], tmp_path / "none.png", "run") is None


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"success_before": 0.5, "success_after": 0.5, "reward_before": 0, "reward_after": 1}, "success has not risen"),
        ({"success_before": 1.0, "success_after": 1.0}, None),
        ({"reward_before": 2.5, "reward_after": 2.25}, "reward has not risen"),
    ],
)
def test_a_run_that_has_learned_nothing_says_so(figures: dict[str, float], said: str | None, tmp_path: Path) -> None:
    told = [line for line in conclude("run", figures, tmp_path, None) if "has not risen" in line]
    assert [line.partition(":")[0] for line in told] == ([said] if said else [])


def test_a_notice_is_shown_once_and_again_at_the_end_with_its_count() -> None:
    said: list[str] = []
    logger = logging.getLogger("agentfactory")
    with suppress(InterruptedError), tell_warnings(said.append):
        for died in ("call 3", "call 9", "call 12"):
            notify(logger, "tool server search", f"tool server search was restarted at {died}", see="logs/worker.log")
        for lost in (4, 80):
            notify(logger, "lost chains", f"{lost} of 128 chains are lost", times=0)
        logger.warning("some other warning")
        said.append("a step")
        raise InterruptedError
    assert said == [
        "warning: tool server search was restarted at call 3; see logs/worker.log",
        "warning: 4 of 128 chains are lost",
        "warning: some other warning",
        "a step",
        "warnings of this run:\n"
        "  tool server search was restarted at call 12; see logs/worker.log (3 times)\n"
        "  80 of 128 chains are lost",
    ]
    with tell_warnings(said.append):
        logger.warning("another")
    assert said[5:] == ["warning: another"], "a run without a notice ends without a list"

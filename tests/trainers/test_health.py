"""A failing run is reported with its cause; a learning run gives no warning."""

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.findings import Finding
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.config import Symptom
from agentfactory.trainers.loop.health import Health
from agentfactory.trainers.metrics import group_metrics


def step(number: int, **figures: Any) -> dict[str, Any]:
    """Return a step's metrics in a healthy run: success rises and entropy falls, both with noise."""
    draw = random.Random(number)
    progress = min(number / 40, 1.0)
    return {
        "step": number,
        "grad_norm": draw.uniform(0.08, 0.3),
        "groups/equal_rewards": draw.choice([0.0, 0.125, 0.5]),
        "success": min(0.1 + 0.85 * progress + draw.uniform(-0.05, 0.05), 1.0),
        "reward": 0.2 + 0.7 * progress,
        "reward_std": 0.4 * (1 - progress) + 0.05,
        "entropy": 0.2 - 0.15 * progress + draw.uniform(-0.02, 0.02),
        "mismatch/kl": draw.uniform(5e-4, 4e-3),
        "learning_rate": 4e-4,
        "turns": 5.0,
        "trajectory/tool_errors/malformed_call": 0.02,
        **figures,
    }


MALFORMED = "trajectory/tool_errors/malformed_call"


def lines(count: int, since: int = 0, later: dict[str, Any] | None = None, **always: Any) -> list[dict[str, Any]]:
    """Return steps of a healthy run with some figures, and `later` ones after step `since`."""
    return [step(n, **{**always, **((later or {}) if n > since else {})}) for n in range(1, count + 1)]


def findings(*lines: dict[str, Any], alike: bool = True) -> list[tuple[int, Finding]]:
    health = Health(alike)
    return [(line["step"], finding) for line in lines for finding in health.note(line)]


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the first steps of a run. Those that collapsed, and those beside them, are at staleness 2, from before
    behaviour_kl kept the policy close to its data."""
    record = json.loads(Path(__file__).with_name("recorded_runs.json").read_text(encoding="utf-8"))
    return [dict(zip(record["figures"], figures, strict=True)) for figures in record["runs"][name]]


@pytest.mark.parametrize("seed", [0, 3, 5])
def test_runs_that_collapsed_are_told_within_five_steps(seed: int) -> None:
    run = recorded(f"collapsed, seed {seed}")
    broken = (line["step"] for line in run if line[MALFORMED] > 0.1 * line["turns"])
    told = findings(*run)
    assert told[0][0] <= next(broken) + 5
    assert "the format has been lost" in told[0][1].text
    assert {found.topic for _, found in told} >= {Symptom.MISMATCH, Symptom.FORMAT}


@pytest.mark.parametrize("seed", [0, 1])
def test_runs_beside_them_that_learned_are_left_alone(seed: int) -> None:
    assert findings(*recorded(f"healthy, seed {seed}")) == []


@pytest.mark.parametrize(
    "name",
    [
        # Qwen2.5-Coder-0.5B on a GPU: held-out success rose from 0.06 and 0.12 to 0.25 and 0.33 in 20 steps, while the
        # questions became longer, and up to a tenth of the turns were calls cut at rollout.max_tokens
        "word problems, short ones first, seed 0",
        "word problems, short ones first, seed 1",
        # held-out success rose from 0.15 to 0.57; the entropy of a step is that of the one or two tasks whose words the
        # small network does not know
        "alfworld, eight tasks a step",
    ],
)
@pytest.mark.parametrize("alike", [True, False])
def test_runs_that_learned_from_harder_and_easier_tasks_are_left_alone(name: str, alike: bool) -> None:
    run = recorded(name)
    assert findings(*run, alike=alike) == []
    # they would be told if their format had been lost
    lost = {MALFORMED: 0.6 * run[-1]["turns"]}
    after = [{**run[-1], **lost, "step": run[-1]["step"] + n} for n in range(1, 6)]
    ((_, found),) = findings(*run, *after, alike=alike)
    assert found.topic is Symptom.FORMAT


def test_figures_that_are_missing_or_not_finite_are_no_fault() -> None:
    run = lines(29, entropy=math.nan, **{"mismatch/kl": math.nan})
    for line in run:
        del line["success"], line["turns"]
    assert findings(*run) == []


def test_chains_alone_in_their_groups_are_compared_with_each_other() -> None:
    def group(reward: float) -> Group:
        return Group("g", {}, [Trajectory("g.0", [], [], Outcome.COMPLETED, reward)])

    differ = group_metrics([group(0.0), group(1.0)], Counter())
    assert differ["groups/equal_rewards"] == 0.0
    assert group_metrics([group(1.0), group(1.0)], Counter())["groups/equal_rewards"] == 1.0


DEAD = {"groups/equal_rewards": 1.0, "grad_norm": 0.0}
NEVER = {**DEAD, "success": 0.0, "reward": 0.0, "reward_std": 0.0}
DRIFT = {"mismatch/kl": 0.2, "staleness/max": 2}
FEW_CALLS = {"since": 20, "trajectory/tool_calls": 3.0, "success": 0.6}


def without_success(count: int, reward: float, later: float) -> list[dict[str, Any]]:
    run = lines(count, 14, {"reward": later}, reward=reward, reward_std=1.0)
    return [{name: value for name, value in line.items() if name != "success"} for line in run]


@pytest.mark.parametrize(
    "run",
    [
        lines(199),
        # four in a row may be chance, and if every chain succeeds nothing is left to learn
        [step(n, **(DEAD if n % 5 else {})) for n in range(1, 60)],
        lines(59, **DEAD, success=1.0),
        # a model that learns the format
        [step(n, **{MALFORMED: 4.0 - 0.1 * n}) for n in range(1, 40)],
        # an agent that gets better may need fewer calls
        lines(39, later={"trajectory/tool_calls": 0.4, "success": 0.9}, **FEW_CALLS),
        # one step that stands out
        [step(n, **({"entropy": 2.0, "mismatch/kl": 3.0} if n == 15 else {})) for n in range(1, 20)],
        # a low-precision server always has a large mismatch
        lines(39, **{"mismatch/kl": 0.2}),
        # little success that halves is chance
        lines(24, 14, {"success": 0.03}, success=0.09),
        # a fall smaller than the rewards' spread
        without_success(24, 1.0, 0.4),
    ],
)
def test_a_healthy_run_is_left_alone(run: list[dict[str, Any]]) -> None:
    assert findings(*run) == []


@pytest.mark.parametrize(
    ("run", "told", "texts"),
    [
        (
            lines(29, 10, DEAD),
            [(15, "no_gradient")],
            ("step 15: nothing was learned in 5 steps: in every group all chains have the same", "grad_norm 0"),
        ),
        # once, and again after it was gone
        (
            [step(n, **(DEAD if n not in (20, 21) else {})) for n in range(1, 40)],
            [(5, "no_gradient"), (26, "no_gradient")],
            (),
        ),
        # a format that the model never wrote
        (
            lines(19, **NEVER, **{MALFORMED: 4.5, "trajectory/truncated_turns": 0.5}),
            [(5, "no_gradient")],
            ("; the calls of 4.5 of 5.0 turns a chain cannot be read, and 0.5 of 5.0 turns a chain are cut at",),
        ),
        (
            lines(39, 20, {MALFORMED: 1.0}),
            [(24, "format")],
            ("step 24: the turns that could be parsed fell from 100% to 80%; the format has been lost; a likely",),
        ),
        (
            lines(39, later={"trajectory/tool_calls": 0.4, "success": 0.35}, **FEW_CALLS),
            [(23, "format")],
            ("the calls of a chain fell from 3.0 to 1.1, and success from 0.60 to 0.41",),
        ),
        (lines(17, 15, {"entropy": 0.7, "success": 0.1}), [(17, "entropy"), (17, "unstable")], ()),
        (
            lines(19, 15, DRIFT, success=0.2),
            [(18, "mismatch")],
            ("mismatch/kl is 0.2 nats", "lower train.learning_rate or rollout.max_staleness"),
        ),
        (
            lines(39, 30, {"success": 0.1, MALFORMED: 4.0}, success=0.5),
            [(31, "format"), (33, "success")],
            (
                "success was 0.20 over the last 4 steps, and 0.50 up to step",
                "the format has been lost: the calls of 4.0 of 5.0 turns a chain cannot be read (80%, and 0% before)",
            ),
        ),
        # of tasks without success, the reward counts
        (without_success(24, 6.0, 2.0), [(18, "success")], ()),
    ],
)
def test_a_failing_run_is_told(run: list[dict[str, Any]], told: list[tuple[int, str]], texts: tuple[str, ...]) -> None:
    found = findings(*run)
    assert [(number, one.topic) for number, one in found] == told
    for text in texts:
        assert text in found[-1][1].text


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        (
            {"cancelled/chains": 3.0, "cancelled/tokens": 300.0, "chains": 97.0, "success": 0.1}
            | {"started/success_most": 0.13},
            "3% of the chains of the last 4 steps were cancelled at rollout.max_staleness, after 100 tokens on "
            "average, and the trained ones are those that were faster: success is 0.10, and with them up to 0.13",
        ),
        ({"staleness/untrained": 0.4}, "40% of the sampled tokens of the last 4 steps were too old to train"),
    ],
)
def test_late_chains_that_are_lost_are_told(figures: dict[str, float], text: str) -> None:
    ((number, finding),) = findings(*lines(11, **figures))
    assert (number, finding.topic) == (4, Symptom.LATE_CHAINS)
    assert finding.text.startswith(f"step 4: {text}")
    assert "fix: a higher rollout.max_staleness, or rollout.late_chains=wait; see docs/staleness.md" in finding.text
    few = {"cancelled/chains": 4.0, "cancelled/tokens": 400.0, "chains": 96.0, "staleness/untrained": 0.1}
    assert findings(*lines(11, **few, success=0.5)) == []

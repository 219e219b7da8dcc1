"""`@reward`: arguments by name, options, weights, groups, and errors for mistakes."""

import asyncio
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import EnvironmentReward
from agentfactory.rollout.config import RewardConfig, RolloutConfig, RolloutRecipe
from agentfactory.rollout.data.notices import tell_null_fields
from agentfactory.rollout.evaluation.evaluate import try_rewards
from agentfactory.rollout.rewards import RewardError, Rewards, reward
from agentfactory.rollout.trajectory import Outcome, Trajectory

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "let me see", "tool_calls": []},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "4"},
    {"role": "tool", "content": "too late"},
]
TRAJECTORY = Trajectory("c", MESSAGES, [], Outcome.COMPLETED)
MINE = """
import asyncio
from agentfactory import reward

@reward
def one(answer, scale=1.0):
    return scale * len(answer)

def two():
    return 2

@reward
def by_turn():
    return {"reward": 1.0, "turn_rewards": [1.0, 3.0]}

@reward
def stuck(answer):
    answer.wait(30)

@reward
async def stuck_too(answer):
    await asyncio.Event().wait()

@reward
def three(trajectory, **row):
    return {"reward": 3, "fields": len(row)}

@reward
class Counting:
    def __init__(self, start: int):
        self.count = start

    def check(self, row):
        if "answer" not in row:
            raise ValueError("needs an answer")

    async def __call__(self, prediction):
        self.count += 1
        return self.count

    def close(self):
        self.count = -1

@reward(group=True)
def shortest(predictions, answer, bonus=1.0):
    return [bonus * (len(p) == min(map(len, predictions))) for p in predictions]
"""


@reward
def exact(prediction: str, answer: str) -> dict:
    hit = float(prediction == answer)
    return {"reward": hit, "success": hit}


@reward
async def brevity(trajectory: Trajectory, environment: EnvironmentReward | None, scale: float = 0.5) -> float:
    return scale * (environment.reward if environment else 1.0) / len(trajectory.messages)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Rewards]:
    (tmp_path / "mine.py").write_text(MINE)

    def load(*entries: dict[str, Any] | str) -> Rewards:
        configs = [RewardConfig(**({"reward": entry} if isinstance(entry, str) else entry)) for entry in entries]
        return Rewards(configs, tmp_path)

    return load


def chain(text: str, reward: float | None = 0.0, **fields: Any) -> Trajectory:
    return Trajectory(text, [{"role": "assistant", "content": text}], [], Outcome.COMPLETED, reward, turns=1, **fields)


async def test_arguments_come_by_name() -> None:
    seen: dict[str, Any] = {}

    @reward
    def asks(
        final_response: str, prediction: str, trajectory: Trajectory, environment: Any, answer: str, **row: Any
    ) -> int:
        seen.update(final=final_response, prediction=prediction, trajectory=trajectory, answer=answer, row=row)
        return 1

    await Rewards([asks]).score(TRAJECTORY, {"answer": "4", "level": 3}, None)
    assert seen == {"final": "4", "prediction": "4", "trajectory": TRAJECTORY, "answer": "4", "row": {"level": 3}}


async def test_a_reward_changes_copies_only() -> None:
    @reward
    def takes_all(trajectory: Trajectory, gold: list[str], meta: dict[str, list[int]], keep: list[int]) -> float:
        trajectory.messages[0]["content"] = "changed"
        for values in (trajectory.messages, trajectory.rows, gold, meta["seen"], keep):
            values.pop()
        return 1.0

    @reward(group=True)
    def takes_all_together(trajectories: list[Trajectory], gold: list[str]) -> list[float]:
        trajectories[0].messages.clear()
        trajectories[0].reward = 7.0
        return [float(len(gold.pop()))] * len(trajectories)

    class Checked:
        def __call__(self, prediction: str, gold: list[str]) -> float:
            return float(prediction == gold[0])

        def check(self, row: dict[str, Any]) -> None:
            row["gold"].pop()

    trajectory = Trajectory("c", deepcopy(MESSAGES), [cast(Any, "row")], Outcome.COMPLETED, reward=1.0)
    before, task = deepcopy(trajectory), {"gold": ["4"], "meta": {"seen": [1]}, "keep": [3]}
    rewards = Rewards([takes_all, takes_all_together, Checked()])
    rewards.check(task)
    for _ in range(2):
        assert (await rewards.score(trajectory, task, None)).reward == 2.0
    assert trajectory == before
    await rewards.score_group([trajectory], task)
    assert trajectory == replace(before, reward=2.0, metrics=trajectory.metrics)
    assert task == {"gold": ["4"], "meta": {"seen": [1]}, "keep": [3]}


def test_needed_fields_that_are_nan_are_told(caplog: pytest.LogCaptureFixture) -> None:
    # as pandas writes a lacking value: no answer equals it
    tell_null_fields([{"answer": "4"}, {"answer": float("nan")}, {"answer": None}], "data", {"answer": "exact"})
    text = "data: the field answer, which exact needs, is null or NaN in 2 of 3 rows, first in row 2"
    assert [text in record.message for record in caplog.records] == [True]


async def test_rewards_are_summed_and_metrics_kept() -> None:
    rewards = Rewards([exact, brevity])
    scored = await rewards.score(TRAJECTORY, {"answer": "4"}, None)
    assert scored == EnvironmentReward(1.0 + 0.1, {"success": 1.0, "reward/exact": 1.0, "reward/brevity": 0.1})
    scored = await rewards.score(TRAJECTORY, {"answer": "5", "scale": 5.0}, EnvironmentReward(2.0, {"moves": 3.0}))
    metrics = {"moves": 3.0, "success": 0.0, "reward/exact": 0.0, "reward/brevity": 2.0}
    assert scored == EnvironmentReward(0.0 + 2.0, metrics)
    # a single reward is the chain's reward, without a separate metric; it may replace an environment's metric
    scored = await Rewards([exact]).score(TRAJECTORY, {"answer": "4"}, EnvironmentReward(2.0, {"success": 0.0}))
    assert scored == EnvironmentReward(1.0, {"success": 1.0})


async def test_weights_scale_what_is_summed_and_not_what_is_logged(load: Callable[..., Rewards]) -> None:
    rewards = load(
        {"reward": "mine.py:one", "weight": 0.5, "options": {"scale": 4}}, {"reward": "mine.py:three", "weight": -1}
    )
    scored = await rewards.score(TRAJECTORY, {"answer": "ab"}, None)
    assert scored == EnvironmentReward(4.0 - 3.0, {"reward/one": 8.0, "fields": 1.0, "reward/three": 3.0})

    thrice = await load(*["mine.py:one"] * 3).score(TRAJECTORY, {"answer": "ab"}, None)
    assert thrice.metrics.keys() == {"reward/one", "reward/one_2", "reward/one_3"}

    scored = await load({"reward": "mine.py:by_turn", "weight": 0.5}).score(replace(TRAJECTORY, turns=2), {}, None)
    assert scored == EnvironmentReward(0.5, {}, [0.5, 1.5])


async def test_without_rewards_the_environment_counts() -> None:
    given = EnvironmentReward(0.25, {"success": 0.0})
    assert await Rewards([]).score(TRAJECTORY, {}, given) == given
    with pytest.raises(ValueError, match="no reward"):
        await Rewards([]).score(TRAJECTORY, {}, None)


def test_fields_of_rows_are_compared_with_parameters_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"rewards\.1: exact needs 'answer'.*question.*data\.columns"):
        Rewards([brevity, exact]).check({"question": "q"})
    Rewards([exact, brevity]).check({"question": "q", "answer": "4"})
    with pytest.raises(SettingError, match=r"takes 'prediction', which is also a field.*row_prediction: prediction"):
        Rewards([exact]).check({"answer": "4", "prediction": "weather"})
    Rewards([brevity]).check({"prediction": "weather"})
    rows = [{"question": "q", "answer": "a"}] * 3 + [{"question": "q"}] * 2
    for name, problem in ((exact, "exact needs 'answer', .*"), ("exact_match", "exact_match .*")):
        with pytest.raises(SettingError, match=rf"{problem}, in row 4 of eval\.data; fix: "):
            Rewards([name]).check_rows(rows, "eval.data")


async def test_rewards_of_turns_are_summed_by_turn() -> None:
    @reward
    def effort(trajectory: Trajectory) -> dict:
        return {"reward": 1.0, "turn_rewards": [-0.5] * trajectory.turns}

    @reward
    def insight() -> dict:
        return {"reward": 0.0, "turn_rewards": (0, 2), "deep": True}

    chain = replace(TRAJECTORY, turns=2)
    scored = await Rewards([exact, effort, insight]).score(chain, {"answer": "4"}, None)
    assert (scored.reward, scored.turn_rewards) == (2.0, [-0.5, 1.5])
    assert scored.metrics["deep"] == 1.0
    with pytest.raises(ValueError, match="insight gave 2 turn_rewards, but the chain has 3 assistant turns"):
        await Rewards([effort, insight]).score(replace(TRAJECTORY, turns=3), {}, None)
    given = EnvironmentReward(0.5, {}, [1.0])
    with pytest.raises(ValueError, match="the environment gave 1 turn_rewards, but the chain has 2"):
        await Rewards([]).score(chain, {}, given)
    assert await Rewards([]).score(replace(chain, turns=1), {}, given) == given


SCALARS = (3, 3.0, True + 2, np.float32(3), np.int64(3), np.array(3), torch.tensor(3), {"reward": torch.tensor(3.0)})
NO_NUMBERS = (None, float("nan"), np.array([1.0, 2.0]), {"reward": 1, "turn_rewards": 0.5})


async def test_any_scalar_and_nothing_else_is_a_reward() -> None:
    for result in SCALARS:
        scored = await Rewards([lambda given=result: given]).score(TRAJECTORY, {}, None)
        assert scored == EnvironmentReward(3.0)
        assert type(scored.reward) is float
    for result in NO_NUMBERS:
        with pytest.raises(TypeError, match=r"<lambda>.* returned"):
            await Rewards([lambda given=result: given]).score(TRAJECTORY, {}, None)


async def test_an_error_of_a_reward_names_it() -> None:
    def wrong() -> float:
        raise TimeoutError("of its own")

    async def wrong_later() -> float:
        raise TimeoutError("of its own")

    for function, name in ((wrong, "wrong"), (wrong_later, "wrong_later"), (lambda: wrong_later(), "<lambda>")):
        with pytest.raises(RewardError, match=f"{name} raised TimeoutError: of its own"):
            await Rewards([function]).score(TRAJECTORY, {}, None)


@pytest.mark.parametrize("name", ["stuck", "stuck_too"])
async def test_a_slow_reward_leaves_the_loop_alone_and_has_a_time_limit(
    load: Callable[..., Rewards], name: str
) -> None:
    let_go = threading.Event()
    rewards = load({"reward": f"mine.py:{name}", "timeout_seconds": 0.5})
    scoring = asyncio.create_task(rewards.score(TRAJECTORY, {"answer": let_go}, None))
    ticks = 0
    while not scoring.done():
        await asyncio.sleep(0.01)
        ticks += 1
    let_go.set()
    assert ticks > 3
    with pytest.raises(RewardError, match=rf"{name} took longer than rewards\.0\.timeout_seconds=0\.5"):
        await scoring


async def test_blocking_rewards_of_many_chains_run_side_by_side() -> None:
    barrier = threading.Barrier(20)

    def together() -> float:
        barrier.wait(20)  # breaks, and raises, unless all of them run at once
        return 1.0

    rewards = Rewards([together])
    scored = await asyncio.gather(*(rewards.score(TRAJECTORY, {}, None) for _ in range(20)))
    assert [one.reward for one in scored] == [1.0] * 20


async def test_two_rewards_may_not_give_one_metric() -> None:
    @reward
    def lenient(prediction: str) -> dict:
        return {"reward": 1.0, "success": 1.0}

    with pytest.raises(ValueError, match="exact and lenient both have the metric 'success'"):
        await Rewards([exact, lenient]).score(TRAJECTORY, {"answer": "4"}, None)


async def test_a_class_is_made_once_with_its_options(load: Callable[..., Rewards]) -> None:
    rewards = load({"reward": "mine.py:Counting", "options": {"start": 5}})
    async with rewards:
        scored = [(await rewards.score(TRAJECTORY, {}, None)).reward for _ in range(2)]
    assert scored == [6.0, 7.0]
    assert (await rewards.score(TRAJECTORY, {}, None)).reward == 0.0  # the reward was closed
    with pytest.raises(SettingError, match=r"rewards\.0: Counting needs an answer"):
        rewards.check({"question": "q"})
    rewards.check({"question": "q", "answer": "a"})


OPTION = "rewards.1.options"


@pytest.mark.parametrize(
    ("name", "options", "field", "message"),
    [
        ("mine.py:two", {}, "rewards.1", r"mine\.py:two is not a reward; fix: put @reward above"),
        ("exact_mach", {}, "rewards.1", r"'exact_mach' is not prebuilt .*; fix: name an object"),
        ("mine.py:Counting", {}, OPTION, "could not be created.*its options are start"),
        ("mine.py:shortest", {"bnus": 1}, f"{OPTION}.bnus", "use one of answer, bonus"),
        ("mine.py:three", {"trajectory": 1}, f"{OPTION}.trajectory", "from the chain"),
        ("f1", {"feild": "x"}, f"{OPTION}.feild", "use one of field, extract, extract_answer"),
        ("f1", {"extract": "("}, f"{OPTION}.extract", r"got '\(': not a regular expression"),
        ("format", {}, OPTION, "set either pattern or tags"),
    ],
)
def test_entries_that_cannot_work(
    load: Callable[..., Rewards], name: str, options: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(SettingError, match=message) as refused:
        load("mine.py:one", {"reward": name, "options": options})
    assert refused.value.field == field
    assert refused.value.fix


async def test_a_group_is_judged_together(load: Callable[..., Rewards]) -> None:
    rewards = load({"reward": "mine.py:shortest", "weight": 2, "options": {"bonus": 3}}, "mine.py:one")
    assert rewards.has_group_rewards
    assert not load("mine.py:one").has_group_rewards
    alone = await rewards.score(chain("a"), {"answer": "a"}, None)
    assert alone == EnvironmentReward(1.0, {"reward/one": 1.0})
    chains = [chain("bb", 1.0, metrics={"moves": 2.0}), chain("a", 0.5), chain("x", None), chain("ccc", -1.0)]
    await rewards.score_group(chains, {"answer": "a"})
    assert [one.reward for one in chains] == [1.0, 6.5, None, -1.0]
    assert chains[0].metrics == {"moves": 2.0, "reward/shortest": 0.0}
    assert chains[1].metrics == {"reward/shortest": 3.0}
    await rewards.score_group([chain("x", None)], {"answer": "a"})  # no chain to judge


async def test_a_group_reward_sees_trajectories_and_may_be_async_and_judge_turns() -> None:
    @reward(group=True)
    async def rank(trajectories: list[Trajectory], predictions: list[str], level: int) -> list[Any]:
        best = max(one.reward or 0.0 for one in trajectories)
        return [
            {"reward": level * (one.reward == best), "turn_rewards": [0.5], "rank": number}
            for number, one in enumerate(trajectories)
        ]

    chains = [chain("a", 1.0, turn_rewards=[2.0]), chain("b", 0.0)]
    rewards = Rewards([rank])
    with pytest.raises(SettingError, match="rank needs 'level', which is neither one of predictions, trajectories"):
        rewards.check({"question": "q"})
    assert await rewards.score(chains[0], {"level": 4}, None) == EnvironmentReward(0.0)
    await rewards.score_group(chains, {"level": 4})
    assert [(one.reward, one.turn_rewards) for one in chains] == [(5.0, [2.5]), (0.0, [0.5])]
    assert [one.metrics for one in chains] == [{"rank": 0.0}, {"rank": 1.0}]


@pytest.mark.parametrize(
    ("verdicts", "message"),
    [
        (1.0, "returned 1.0; it must return a list with a number or dict for each of the 2 chains"),
        *(([1.0], "for each of the 2 chains"), ("ab", "for each of the 2 chains"), ([1.0, None], "returned None")),
        ([1.0, {"reward": 1.0, "turn_rewards": [1.0, 2.0]}], "2 turn_rewards, but the chain has 1"),
        (ZeroDivisionError("no"), "odd raised ZeroDivisionError: no"),
    ],
)
async def test_a_group_reward_that_fails_leaves_no_reward(verdicts: Any, message: str) -> None:
    @reward(group=True)
    def odd(predictions: list[str]) -> Any:
        if isinstance(verdicts, Exception):
            raise verdicts
        return verdicts

    chains = [chain("a", 1.0), chain("b", 0.0, turn_rewards=[1.0]), chain("x", None)]
    await Rewards([odd]).score_group(chains, {})
    for one in chains[:2]:
        assert (one.outcome, one.reward, one.turn_rewards) == (Outcome.REWARD_ERROR, None, None)
        assert message in (one.error or "")
    assert (chains[2].outcome, chains[2].error) == (Outcome.COMPLETED, None)


LOOKS = """
from agentfactory import reward
from pathlib import Path

@reward
def looks(workspace, trajectory):
    Path("seen").write_text(str(workspace))
    (workspace / "report").write_text("made")
    return float((workspace / "desk").read_text() + (workspace / "a/shelf").read_text() == "deskshelf")
@reward
def solved(workspace): return float((workspace / "solution.py").exists())
"""


@pytest.mark.processes
@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
async def test_rewards_are_tried_in_the_folder_of_a_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("looks.py").write_text(LOOKS)
    Path("template").mkdir()
    Path("template/desk").write_text("desk")
    agent = {"command": ["sh"], "options": {"workspace": "template", "sandbox": sandbox}}
    recipe = RolloutRecipe(model={"path": "m"}, rewards=["looks.py:looks", "looks.py:solved"], rollout={"agent": agent})
    tasks = [{"question": "q", "files": {"a/shelf": "shelf"}}]
    assert await try_rewards(recipe, tmp_path, tasks, None) == []
    seen = Path(Path("seen").read_text())
    assert seen.is_absolute()
    assert not seen.exists()
    (fault,) = await try_rewards(recipe, tmp_path, [{"question": "q"}], None)
    assert "rewards.0, on a dummy answer to task 1: looks raised FileNotFoundError" in fault

    without = recipe.model_copy(update={"rollout": RolloutConfig()})
    faults = await try_rewards(without, tmp_path, tasks, None)
    assert [fault.partition("; ")[2] for fault in faults] == [
        "chains have no workspace, because no program is the agent (rollout.agent.command)"
    ] * 2

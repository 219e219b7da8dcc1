"""`agentfactory rollout` and `eval`: saved groups follow the recipe's policies, rewards and agent."""

import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from agentfactory.rollout.config import DataConfig, RolloutRecipe
from agentfactory.rollout.data import load_tasks
from agentfactory.rollout.evaluation.evaluate import evaluate, open_sources, run_eval, run_rollout
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.sources import Loaded, Source
from agentfactory.rollout.trajectory import Outcome
from tests.conftest import QUICKSTART

NEEDS_ANSWER = "from agentfactory import reward\n\n\n@reward\ndef right(prediction, answer):\n    return 1.0\n"


def recipe_of(model: Path, **sections: Any) -> RolloutRecipe:
    given = {"model": {"path": str(model), "dtype": "float32"}, "server": {"engine": "embedded"}}
    return RolloutRecipe.model_validate({**given, **sections})


def opening(
    recipe: RolloutRecipe, tasks: list[dict[str, Any]], base: Path, url: str
) -> AbstractAsyncContextManager[Sequence[Source[Any]]]:
    return open_sources(recipe, [Loaded.only(recipe, tasks)], base, url)


HUNT = [str(QUICKSTART / "treasure_hunt.py:TreasureHunt")]


def test_groups_follow_the_policies(warm_server: str, warm_start: Path, quickstart_run: Path, tmp_path: Path) -> None:
    """With a limit of one turn, a chain that calls a tool ends there; its outcome is set to be retried, not scored."""
    rollout = {"group_size": 2, "max_turns": 1, "max_tokens": 40, "on_outcome": {"max_turns": "retry"}}
    recipe = recipe_of(warm_start, tools=HUNT, rollout=rollout)
    tasks = load_tasks(DataConfig(path=str(quickstart_run / "prepared" / "train.jsonl"), limit=12))
    run_rollout(recipe, tmp_path, lambda record: None, opening(recipe, tasks, QUICKSTART, warm_server))
    chains = [chain for group in read_groups(tmp_path / "rollout.jsonl") for chain in group.trajectories]
    assert len(chains) == 24
    called = [chain for chain in chains if chain.outcome is Outcome.MAX_TURNS]
    assert called, "the short warm start calls tools"
    for chain in chains:
        assert (chain.reward is None) == (chain in called)
        assert chain.id.endswith(".retry") or chain not in called


STOPS = """
import os
import signal
from agentfactory import reward


@reward
def stop(prediction):
    os.kill(os.getpid(), signal.SIGINT)
    return 0.0
"""


def test_what_a_signal_cut_is_apart(warm_server: str, warm_start: Path, quickstart_run: Path, tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(STOPS)
    recipe = recipe_of(warm_start, tools=HUNT, rewards=["stops.py:stop"], rollout={"group_size": 8, "max_tokens": 40})
    tasks = load_tasks(DataConfig(path=str(quickstart_run / "prepared" / "train.jsonl"), limit=1))
    with pytest.raises(KeyboardInterrupt):
        run_rollout(recipe, tmp_path, lambda record: None, opening(recipe, tasks, tmp_path, warm_server))
    assert [*read_groups(tmp_path)] == []
    (group,) = read_groups(tmp_path / "unfinished")
    assert group.task == tasks[0]
    assert sum(chain.turns for chain in group.trajectories) > 0
    assert Outcome.CANCELLED in [chain.outcome for chain in group.trajectories]


USERS = """
from agentfactory import Agent, reward


class Brief(Agent):
    async def generate(self, turn):
        return await turn.sample(max_tokens=3)


@reward
def tokens(trajectory):
    return sum(map(sum, (row.mask for row in trajectory.rows)))


@reward(group=True)
def together(trajectories):
    return [1000.0 * len(trajectories)] * len(trajectories)
"""


def test_agent_and_group_rewards_of_the_recipe_are_used(warm_server: str, warm_start: Path, tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(USERS)
    tasks = [{"question": "go"}, {"question": "run"}]
    penalties = {"outcome_penalty": {"max_tokens": 100, "max_turns": 50}}
    rollout = {"group_size": 3, "max_turns": 1, "agent": "users.py:Brief", **penalties}
    rewards = ["users.py:tokens", "users.py:together"]
    recipe = recipe_of(warm_start, rewards=rewards, rollout=rollout, eval={"samples": 2})
    logged: list[dict[str, float]] = []
    run_rollout(recipe, tmp_path, logged.append, opening(recipe, tasks, tmp_path, warm_server))
    chains = [chain for group in read_groups(tmp_path / "rollout.jsonl") for chain in group.trajectories]
    assert len(chains) == 6
    for chain in chains:
        sampled = chain.metrics["sampled_tokens"]
        assert sampled <= 3
        penalty = {Outcome.MAX_TOKENS: 100.0, Outcome.MAX_TURNS: 50.0}.get(chain.outcome, 0.0)
        assert chain.metrics["penalty"] == penalty
        assert chain.reward == 3000.0 + sampled - penalty
    assert any(chain.metrics["penalty"] for chain in chains)
    opened = opening(recipe, tasks, tmp_path, warm_server)
    figures = run_eval(recipe, tmp_path / "eval", logged.append, opened).figures()
    assert 1900 <= figures["sampled/reward"] <= 2003, "as many as are sampled are compared"
    assert 900 <= figures["greedy/reward"] <= 1003
    assert logged[1]["eval/sampled/reward"] == figures["sampled/reward"]
    assert sum(figures[f"sampled/stop/{reason}"] for reason in ("answer", "max_tokens", "max_turns")) == 1.0


def test_what_cannot_run_is_told_before_any_chain_runs(warm_server: str, warm_start: Path, tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(NEEDS_ANSWER)
    recipe = recipe_of(warm_start, rewards=["users.py:right"])
    for run in (run_rollout, run_eval):
        with pytest.raises(ValueError, match="needs 'answer'"):
            run(recipe, tmp_path, lambda record: None, opening(recipe, [{"question": "go"}], tmp_path, warm_server))
    assert not list(tmp_path.glob("*rollout*"))


async def test_without_a_reward_the_commonest_error_is_told(warm_server: str, warm_start: Path, tmp_path: Path) -> None:
    source = "from agentfactory import reward\n\n\n@reward\ndef right(prediction):\n    return {}['lft']\n"
    (tmp_path / "users.py").write_text(source)
    rollout = {"max_turns": 1, "max_tokens": 2}
    recipe = recipe_of(warm_start, rewards=["users.py:right"], rollout=rollout)
    loaded = [Loaded.only(recipe, [{"question": "go"}], "eval.data")]
    async with open_sources(recipe, loaded, tmp_path, warm_server) as sources:
        figures, failures, looks = await evaluate(sources, recipe, "policy", tmp_path, "000000")
    look = looks[""]
    assert figures == {"sampled/failed": 1.0, "greedy/failed": 1.0}
    assert (look.chains, look.rewards) == (1, [])
    assert list(failures) == ["sampled", "greedy"]
    for mode, failure in failures.items():
        assert failure.startswith(f"held-out tasks, {mode}: 1 of 1 chains ended as reward_error, such as: ")
        assert failure.endswith("right raised KeyError: 'lft'")


def test_several_samples_give_pass_at_k_intervals_and_a_table_per_source(
    warm_server: str, warm_start: Path, quickstart_run: Path, tmp_path: Path
) -> None:
    held_out = (quickstart_run / "prepared" / "heldout.jsonl").read_text().splitlines()[:10]
    rows = [{**json.loads(line), "source": "even" if place % 2 == 0 else "odd"} for place, line in enumerate(held_out)]
    rollout = {"max_turns": 8, "max_tokens": 32, "max_total_tokens": 512}
    recipe = recipe_of(warm_start, tools=HUNT, rollout=rollout, eval={"samples": 4})
    logged: list[dict[str, float]] = []
    found = run_eval(recipe, tmp_path / "eval", logged.append, opening(recipe, rows, QUICKSTART, warm_server))
    assert logged == [{f"eval/{name}": value for name, value in found.figures().items()}]
    assert found.chains == 10 * 5
    assert not found.failures
    groups = [*read_groups(tmp_path / "eval" / "final-sampled.jsonl")]
    assert sorted(group.task["question"] for group in groups) == sorted(row["question"] for row in rows)

    def passes(k: int, source: str | None = None) -> float:
        counted = [group for group in groups if source in (None, group.task["source"])]
        successes = [[chain.metrics["success"] for chain in group.trajectories] for group in counted]
        return fmean(fmean(any(choice) for choice in combinations(values, k)) for values in successes)

    figures = found.figures()
    for k in (1, 2, 4):
        assert figures[f"sampled/pass@{k}"] == pytest.approx(passes(k))
        for source in ("even", "odd"):
            assert figures[f"sampled/source/{source}/pass@{k}"] == pytest.approx(passes(k, source))
    assert "greedy/pass@1" not in figures, "one sample is no several"
    assert figures["sampled/avg@4"] == pytest.approx(figures["sampled/success"])
    assert figures["sampled/reward/low"] < figures["sampled/reward"] < figures["sampled/reward/high"]
    reward = fmean(figures[f"sampled/source/{source}/reward"] for source in ("even", "odd"))
    assert reward == pytest.approx(figures["sampled/reward"]), "as many tasks of each"
    opened = opening(recipe, rows, QUICKSTART, warm_server)
    again = run_eval(recipe, tmp_path / "again", logged.append, opened).figures()
    same = [name for name in figures if "seconds" not in name]
    assert {name: again[name] for name in same} == {name: figures[name] for name in same}

"""`agentfactory rollout`: groups for training that are saved as the recipe's policies want them."""

from pathlib import Path

from rollout.config import RolloutRecipe
from rollout.evaluate import run_rollout
from rollout.trajectory import Outcome, read_groups
from tests.conftest import QUICKSTART


def test_saved_groups_follow_the_recipes_policies(
    warm_server: str, warm_start: Path, quickstart_run: Path, tmp_path: Path
) -> None:
    """With one turn a chain that calls a tool ends there: its outcome is to be tried again, and not scored."""
    recipe = RolloutRecipe.model_validate(
        {
            "model": {"path": str(warm_start), "dtype": "float32"},
            "data": {"path": str(quickstart_run / "prepared" / "train.jsonl"), "limit": 12},
            "tools": [str(QUICKSTART / "treasure_hunt.py:TreasureHunt")],
            "rollout": {"group_size": 2, "max_turns": 1, "max_tokens": 40, "on_outcome": {"max_turns": "retry"}},
            "server": {"engine": "embedded"},
        }
    )
    run_rollout(recipe, QUICKSTART, [warm_server], tmp_path, log=lambda record: None)
    chains = [chain for group in read_groups(tmp_path / "rollout.jsonl") for chain in group.trajectories]
    assert len(chains) == 24
    called = [chain for chain in chains if chain.outcome is Outcome.MAX_TURNS]
    assert called, "the short warm start calls tools"
    for chain in chains:
        assert (chain.reward is None) == (chain in called)
        assert chain.id.endswith(".retry") or chain not in called

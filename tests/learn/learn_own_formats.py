"""Part of `make learn`: gpt-oss and a DeepSeek network hunt treasure by the quickstart's way, each in its own format,
on every seed of the variable SEEDS."""

from pathlib import Path

import pytest

from agentfactory.rollout.groups.group_files import read_groups
from tests.learn.runs import SEEDS, assert_risen, lines_of, read_json, shortened, train

FORMATS = {"gpt_oss": "harmony", "deepseek": "deepseek_v31"}
PREPARE = Path(__file__).with_name("own_formats.py")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", FORMATS)
def test_a_network_learns_in_its_own_format(tmp_path: Path, model: str, seed: int) -> None:
    prepare = f"prepare={PREPARE}:{model}"
    habit = train("sft.yaml", seed, tmp_path / "sft", prepare)
    hunt = train("grpo.yaml", seed, tmp_path / "grpo", *shortened(prepare, f"model.path={habit['checkpoint']}"))
    assert_risen(hunt, full=0.85)

    first, second = (read_json(Path(run["checkpoint"]) / "trainer_state.json")["renderer"] for run in (habit, hunt))
    assert second["parser"] == FORMATS[model]
    # conversations of data are judged with their tools, as chains are
    assert first["reasons"] == second["reasons"]
    steps = [line for line in lines_of(tmp_path / "grpo" / "run") if "mismatch/max" in line]
    # the server's log-probabilities are the trainer's
    assert max(step["mismatch/max"] for step in steps) < 1e-3
    chains = [one for group in read_groups(tmp_path / "grpo" / "run" / "trajectories") for one in group.trajectories]
    # a new row begins where the template rewrites a turn, as harmony does with one that is malformed
    assert sum(len(chain.rows) == 1 for chain in chains) > 0.95 * len(chains)

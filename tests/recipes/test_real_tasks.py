"""recipes/real: the reward."""

import pytest

from agentfactory.base.messages import EnvironmentReward
from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.reasoning_gym.reasoning_gym import ReasoningGym
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "real"


@pytest.mark.processes
def test_only_a_full_score_counts() -> None:
    pytest.importorskip("reasoning_gym")
    solved, rows = (load_object(f"tasks.py:{name}", FOLDER) for name in ("solved", "rows"))
    (row,) = rows("letter_counting", 1, 0)
    world = ReasoningGym()
    world.reset(row["question"], row["reasoning_gym"])
    given = [f"<answer>{row['answer']}{more}</answer>" for more in ("", 0)]
    verdicts = [EnvironmentReward.parse(world.reward(prediction), "") for prediction in given]
    world.close()
    assert [solved(verdict) for verdict in verdicts] == [1.0, 0.0]
    assert verdicts[1].reward > 0.0

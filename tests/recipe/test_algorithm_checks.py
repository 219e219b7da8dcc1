"""Options of algorithms that cannot work together, or would do nothing, are refused with the fix."""

from pathlib import Path

import pytest

from agentfactory.recipe.load import load_recipe
from agentfactory.tools.errors import SettingError
from agentfactory.trainers.config import ALGORITHMS

REFUSED = {
    "k1 in the loss": (
        ["train.loss.kl.coefficient=0.1", "train.loss.kl.estimator=k1"],
        "train.loss.kl.estimator",
        "use k2 or k3, or place: reward",
    ),
    "distance in the reward of a chain": (
        ["train.loss.kl.coefficient=0.1", "train.loss.kl.place=reward"],
        "train.loss.kl.place",
        "reinforce_pp or gae",
    ),
    "estimator of no distance": (["train.loss.kl.estimator=k2"], "train.loss.kl.estimator", "kl.coefficient > 0"),
    "mask that nothing passes": (
        ["train.loss.mismatch={correction: token_mask, low: 3}"],
        "train.loss.mismatch.low",
        "lower it",
    ),
    "lower bound of a truncation": (["train.loss.mismatch.low=0.1"], "train.loss.mismatch.low", "token_mask"),
    "bound of no correction": (
        ["train.loss.mismatch={correction: none, high: 3}"],
        "train.loss.mismatch.high",
        "correction",
    ),
    "dropout of an adapter": (["model.lora={rank: 4, dropout: 0.1}"], "model.lora.dropout", "use 0"),
    "another algorithm's option": (["train.algorithm=cispo", "train.loss.clip_low=0.1"], "train.loss.clip_low", "gspo"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(project: Path, case: str) -> None:
    overrides, field, fix = REFUSED[case]
    with pytest.raises(SettingError, match=fix) as caught:
        load_recipe("recipe.yaml", overrides, purpose="train")
    assert caught.value.field == field


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.algorithm=ppo", "train.loss.kl={coefficient: 0.1, estimator: k1, place: reward}"],
        ["train.loss.kl={coefficient: 0.1, estimator: k2}"],
        ["train.loss.mismatch={correction: geometric_mask, low: 0.99, high: 1.01}"],
        ["train.loss.mismatch.high=0.4"],
        *([f"train.algorithm={name}"] for name in ALGORITHMS),
    ],
)
def test_accepted(project: Path, overrides: list[str]) -> None:
    load_recipe("recipe.yaml", overrides, purpose="train")

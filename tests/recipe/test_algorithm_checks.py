"""Options of algorithms that cannot work together, or would do nothing, are refused with the fix."""

from pathlib import Path

import pytest

from agentfactory.recipe.load import load_recipe
from agentfactory.tools.errors import SettingError
from agentfactory.trainers.config import ALGORITHMS

GIGPO = ["train.advantage.estimator=gigpo", "train.advantage.options.anchors=observation"]
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
        ["train.loss.mismatch={correction: token_mask, options: {low: 3}}"],
        "train.loss.mismatch.options.low",
        "lower it",
    ),
    "lower bound of a truncation": (
        ["train.loss.mismatch.options.low=0.1"],
        "train.loss.mismatch.options.low",
        "token_mask",
    ),
    "bound of no correction": (
        ["train.loss.mismatch={correction: none, options: {high: 3}}"],
        "train.loss.mismatch.options.high",
        "correction",
    ),
    "geometric mask of the ratios of tokens": (
        ["train.loss.mismatch.correction=geometric_mask"],
        "train.loss.mismatch.options",
        "low: 0.99, high: 1.01",
    ),
    "dropout of an adapter": (["model.lora={rank: 4, dropout: 0.1}"], "model.lora.dropout", "use 0"),
    "distance in the reward of a turn": (
        [*GIGPO, "train.loss.kl.coefficient=0.1", "train.loss.kl.place=reward"],
        "train.loss.kl.place",
        "reinforce_pp or gae",
    ),
    "states that nobody tells": (["train.algorithm=gigpo"], "train.advantage.estimator", "anchors=observation"),
    "states and a critic": (
        [*GIGPO, "train.algorithm=ppo"],
        "train.algorithm",
        "use gigpo, or remove",
    ),
    "states and the others' mean": ([*GIGPO, "train.algorithm=rloo"], "train.algorithm", "use gigpo"),
    "critic and no critic": (
        ["train.algorithm=ppo", "train.advantage.estimator=grpo"],
        "train.algorithm",
        "use grpo, or remove advantage.estimator",
    ),
    "two policy losses": (
        ["train.algorithm=gspo", "train.loss.policy=cispo"],
        "train.algorithm",
        "use cispo",
    ),
    "states and the batch's deviation": (
        [*GIGPO, "train.advantage.options.scale=batch"],
        "train.advantage.options.scale",
        "'none' or 'group'",
    ),
    "states of one chain": ([*GIGPO, "rollout.group_size=1"], "rollout.group_size", "at least 2"),
    "weight of no state": (
        ["train.advantage.options.step_weight=0.5"],
        "train.advantage.options.step_weight",
        "remove it",
    ),
    "anchors of no state": (
        ["train.advantage.options.anchors=observation"],
        "train.advantage.options.anchors",
        "remove it",
    ),
    "another algorithm's option": (
        ["train.algorithm=cispo", "train.loss.options.clip_low=0.1"],
        "train.loss.options.clip_low",
        "gspo",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(project: Path, case: str) -> None:
    overrides, field, fix = REFUSED[case]
    with pytest.raises(SettingError, match=fix) as caught:
        load_recipe("recipe.yaml", overrides, purpose="train")
    assert caught.value.field == field


def test_a_text_model_has_no_vision_to_train(project: Path) -> None:
    overrides = ["train.vision=1e-6"]
    load_recipe("recipe.yaml", overrides)  # nothing is known of the model
    config = project / "model" / "config.json"
    config.write_text('{"model_type": "qwen3"}')
    with pytest.raises(SettingError, match=r"train\.vision: got 1e-06, but .*model accepts only text; fix: remove it"):
        load_recipe("recipe.yaml", overrides)
    config.write_text('{"model_type": "omni", "thinker_config": {"vision_config": {}}}')
    load_recipe("recipe.yaml", overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.algorithm=ppo", "train.loss.kl={coefficient: 0.1, estimator: k1, place: reward}"],
        ["train.loss.kl={coefficient: 0.1, estimator: k2}"],
        ["train.loss.mismatch={correction: geometric_mask, options: {low: 0.99, high: 1.01}}"],
        ["train.loss.mismatch.options.high=0.4"],
        *([f"train.algorithm={name}"] for name in ALGORITHMS if name not in ("gigpo", "sft")),
        ["train.algorithm=sft", "data.path=talks.jsonl"],
        *(
            [*GIGPO, f"train.algorithm={name}"]
            for name in ("gigpo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo")
        ),
        # an environment that says where it is, and a server that may
        ["train.algorithm=gigpo", "tools=[my_tools.py:Place]"],
        ["train.algorithm=gigpo", "mcp_servers={parts: {command: python, args: [parts.py]}}"],
    ],
)
def test_accepted(project: Path, overrides: list[str]) -> None:
    (project / "talks.jsonl").write_text('{"messages": [{"role": "assistant", "content": "2"}]}\n')
    load_recipe("recipe.yaml", overrides, purpose="train")

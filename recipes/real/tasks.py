"""Tasks of reasoning-gym, which generates them and verifies their answers: rows and the reward."""

from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from agentfactory import reward


def rows(family: str, count: int, seed: int, **settings: Any) -> list[dict[str, Any]]:
    """Return `count` different tasks of a family of reasoning-gym, as rows of `question`, `family` and `entry`; `entry`
    is what the family's verifier reads. `settings` are the family's own."""
    found: dict[str, dict[str, Any]] = {}
    generated = iter(reasoning_gym.create_dataset(family, size=100 * count, seed=seed, **settings))
    while len(found) < count:
        entry = next(generated)
        found[entry["question"]] = {"question": entry["question"], "family": family, "entry": entry}
    return list(found.values())


@reward
def solved(prediction: str, family: str, entry: dict[str, Any]) -> dict[str, float]:
    """Return 1 if the family's verifier accepts the text in the last <answer> of the final message, else 0."""
    score = reasoning_gym.get_score_answer_fn(family)(extract_answer(prediction), entry)
    right = float(score == 1.0)
    return {"reward": right, "success": right}

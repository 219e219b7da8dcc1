"""Tasks of reasoning-gym, which generates them and verifies their answers: rows and the reward."""

from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from agentfactory import reward


def rows(family: str, count: int, seed: int, **settings: Any) -> list[dict[str, Any]]:
    """Return `count` different tasks of a family of reasoning-gym, as rows of `question`, `family` and `entry`; `entry`
    is what the family's verifier reads. `settings` are the family's own."""
    found: dict[str, dict[str, Any]] = {}
    for entry in reasoning_gym.create_dataset(family, size=100 * count, seed=seed, **settings):
        found[entry["question"]] = {"question": entry["question"], "family": family, "entry": entry}
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"{family} has {len(found)} different tasks, not {count}; fix: fewer, or other settings")


@reward
def solved(prediction: str, family: str, entry: dict[str, Any]) -> dict[str, float]:
    """Return 1 if the family's verifier accepts the text in the last <answer> of the final message, else 0."""
    verify = reasoning_gym.get_score_answer_fn(family)
    try:
        score = verify(extract_answer(prediction), entry)
    except Exception:
        # some raise for an answer that they cannot parse; one that raises for its own answer is broken
        verify(entry["answer"], entry)
        score = 0.0
    right = float(score == 1.0)
    return {"reward": right, "success": right}

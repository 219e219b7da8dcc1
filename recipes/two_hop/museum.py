"""Questions about a museum that need two searches: an object's country is not in the object's entry, but in the entry
of the expedition that found it."""

import random
from collections.abc import Iterator
from typing import Any

from agentfactory import reward

COUNTRIES = ("Brazil", "Chile", "Egypt", "Ghana", "India", "Japan", "Nepal", "Peru")
OBJECTS, EXPEDITIONS = range(100, 1000), range(10, 100)
UNKNOWN = "I do not know."


class Museum:
    """The expedition that found each object, and the country of each expedition."""

    def __init__(self, rng: random.Random) -> None:
        self.found_by = {number: rng.choice(EXPEDITIONS) for number in OBJECTS}
        self.went_to = {number: rng.choice(COUNTRIES) for number in EXPEDITIONS}

    def task(self, number: int) -> dict[str, Any]:
        """Return the row of an object: a `question`, and the `answer`."""
        return {
            "question": f"From which country is object {number}?",
            "object": number,
            "answer": self.went_to[self.found_by[number]],
        }

    def entries(self) -> Iterator[tuple[str, str]]:
        """Yield the title and the text of each entry of the catalogue."""
        for number, expedition in self.found_by.items():
            yield f"Object {number}", f"Of this object, the finder is known: expedition {expedition}."
        for number, country in self.went_to.items():
            yield f"Expedition {number}", f"Of this expedition, the goal is known: {country}."


@reward
def answered(prediction: str | None, answer: str) -> dict[str, float]:
    """Return 1 if the answer is the country, else 0."""
    right = float(prediction is not None and prediction.strip() == answer)
    return {"reward": right, "success": right}

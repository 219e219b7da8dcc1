"""The world: an aquarium whose water must be corrected. Change state, tools and reward to make your own."""

from typing import Any, Literal

from agentfactory import Environment, finish, tool


class Aquarium(Environment):
    """An aquarium. Reward: 1 if the water gets right before the day is over, else 0.

    Each chain has an instance for itself; the next chain gets it after a `reset`.
    """

    def reset(self, wanted: int, degrees: int, dirt: int, **task: Any) -> str:
        """Begin a task: the arguments are fields of its row. Return the first observation."""
        self.wanted, self.degrees, self.dirt = wanted, degrees, dirt
        self.hours = abs(degrees - wanted) + dirt + 2  # enough for one mistake, and to undo it
        return self._observe()

    @tool
    def tend(self, action: Literal["heat", "cool", "clean"]) -> Any:
        """Tend the aquarium for an hour.

        Args:
            action: heat and cool change the water by one degree; clean takes away some dirt.
        """
        self.hours -= 1
        match action:
            case "heat":
                self.degrees += 1
            case "cool":
                self.degrees -= 1
            case "clean":
                self.dirt = max(0, self.dirt - 1)
        if self._is_right() or self.hours == 0:
            return finish(self._observe())
        return self._observe()

    def reward(self) -> dict[str, float]:
        """Judge the chain, which has ended. Numbers besides `reward` become metrics."""
        right = float(self._is_right())
        return {"reward": right, "success": right, "hours_left": self.hours}

    def anchor(self) -> tuple[int, int]:
        """Return an identifier of the state: `train.algorithm: gigpo` compares turns that begin with the same water."""
        return self.degrees, self.dirt

    def _is_right(self) -> bool:
        return self.degrees == self.wanted and self.dirt == 0

    def _observe(self) -> str:
        if self.dirt:
            return "The water is dirty."
        if self.degrees == self.wanted:
            return "The water is right."
        return f"The water is too {'cold' if self.degrees < self.wanted else 'warm'}: {self.degrees} degrees."

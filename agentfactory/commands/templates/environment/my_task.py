"""The world: a lift that fetches a parcel in a tower. Change state, tools and reward to make your own."""

from typing import Any, Literal

from agentfactory import Environment, finish, tool


class Lift(Environment):
    """A lift in a tower. Reward: 1 if it reaches the floor with the parcel before its power is used up, else 0.

    Each chain has an instance for itself; the next chain gets it after a `reset`.
    """

    def reset(self, start: int, parcel: int, **task: Any) -> str:
        """Begin a task: `start` and `parcel` are floors, fields of its row. Returns what the agent reads first."""
        self.here, self.parcel = start, parcel
        self.power = abs(parcel - start) + 2  # enough for one ride in the wrong direction, and back
        return self._observe()

    @tool
    def ride(self, direction: Literal["up", "down"]) -> Any:
        """Ride one floor.

        Args:
            direction: Where to ride.
        """
        self.power -= 1
        # below the lowest floor there is only the ground
        self.here = max(1, self.here + (1 if direction == "up" else -1))
        if self.here == self.parcel:
            return finish("The doors open at the parcel.")
        if self.power == 0:
            return finish("The power is used up.")
        return self._observe()

    def reward(self) -> dict[str, float]:
        """Judge the chain, which has ended. Numbers besides `reward` become metrics."""
        arrived = float(self.here == self.parcel)
        return {"reward": arrived, "success": arrived, "power_left": self.power}

    def anchor(self) -> int:
        """Return what identifies the state: `train.algorithm: gigpo` compares turns that begin on the same floor."""
        return self.here

    def _observe(self) -> str:
        return f"Floor {self.here}. The parcel is {'above' if self.parcel > self.here else 'below'} you."

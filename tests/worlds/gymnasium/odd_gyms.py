"""Environments for the tests, registered on import: `tests...odd_gyms:NAME-v0`."""

import os
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Odd(gymnasium.Env[Any, Any]):
    """A counter.

    ## Description
    Count.
    """

    observation_space: Any = spaces.Discrete(10)
    action_space: Any = spaces.Discrete(2)
    count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.observed(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observed(), 1.0, False, False, {}

    def observed(self) -> Any:
        return self.count


class Raises(Odd):
    def step(self, action: Any) -> Any:
        raise RuntimeError("out of ice")


class Hangs(Odd):
    def step(self, action: Any) -> Any:
        while action == 1:
            time.sleep(0.01)
        return super().step(action)


class Prints(Odd):
    def step(self, action: Any) -> Any:
        print("hello from the lake")
        os.write(1, b"and from below\n")
        return super().step(action)


class Exits(Odd):
    def step(self, action: Any) -> Any:
        sys.exit(3) if action == 0 else os._exit(3)


class Graph(Odd):
    action_space = spaces.Graph(spaces.Discrete(2), None)


class Large(Odd):
    observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)


class Hands(Odd):
    """Hands.

    ## Description
    Move them.
    """

    action_space = spaces.MultiDiscrete([3, 2])
    observation_space = spaces.Dict({"left": spaces.Discrete(3), "word": spaces.Text(5)})

    def observed(self) -> Any:
        return {"left": self.count, "word": "ice"}


class BrokenReset(Odd):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed == 7:
            raise RuntimeError("no lake")
        return super().reset(seed=seed)


for kind in (Raises, Hangs, Prints, Exits, Graph, Large, Hands, BrokenReset):
    gymnasium.register(f"{kind.__name__}-v0", entry_point=kind)

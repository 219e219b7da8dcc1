"""Environments for the tests, registered on import: `tests...odd_gyms:NAME-v0`."""

import os
import sys
import time
from typing import Any

import gymnasium
from gymnasium import spaces


class Odd(gymnasium.Env[Any, Any]):
    """A counter.

    ## Description
    Count."""

    observation_space: Any = spaces.Discrete(10)
    action_space: Any = spaces.Discrete(2)
    count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.count, {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.count, 1.0, False, False, {}


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


for kind in (Raises, Hangs, Prints, Exits):
    gymnasium.register(f"{kind.__name__}-v0", entry_point=kind)

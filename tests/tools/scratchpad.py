"""The objects that the tests of this folder serve: an environment with state, and tools that fail in every way."""

import asyncio
import time
from pathlib import Path
from typing import Any, Literal

from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.tool import tool


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


@tool
async def shout(text: str, ending: Literal["!", "?"] = "!") -> str:
    return text.upper() + ending


@tool
def fail(reason: str) -> str:
    raise RuntimeError(reason)


@tool
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


@tool
async def block(path: str) -> str:
    Path(path).touch()
    time.sleep(60)  # noqa: ASYNC251
    return "late"


class Scratchpad(Environment):
    def __init__(self) -> None:
        self.word = "nothing"

    def reset(self, word: str, twice: bool = False) -> str:
        if word == "forbidden":
            raise ValueError("that word is forbidden")
        self.word = word * 2 if twice else word
        return f"The pad says {self.word}."

    @tool
    def write(self, word: str) -> str:
        self.word = word
        time.sleep(0.002)
        return f"wrote {word}"

    @tool
    async def read(self) -> str:
        await asyncio.sleep(0.001)
        return self.word

    @tool
    def tear(self) -> str:
        raise ValueError("the pad cannot be torn")

    def reward(self) -> dict[str, Any]:
        if self.word == "priceless":
            raise ValueError("beyond measure")
        if self.word == "by turn":
            return {"reward": 0.5, "turn_rewards": [1, -0.25]}
        return {"reward": float(len(self.word)), "success": self.word != "nothing"}

    async def release(self) -> None:
        if self.word == "clingy":
            raise RuntimeError("will not let go")
        self.word = "nothing"

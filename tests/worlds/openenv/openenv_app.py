"""Servers of OpenEnv's own package, run by its Python: `openenv_app.py PLACES`. Prints the address."""

import os
import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import Field


class Move(Action):
    by: int = Field(description="Cells to move", ge=-2, le=2)
    note: str = ""


class Seen(Observation):
    text: str
    picture: list[list[list[int]]]


class Line(Environment):
    """A line of cells with a goal."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Seen:
        self.at, self.goal = 0, 1 + (seed or 0) % 5
        return self.seen(None)

    def step(self, action: Move, timeout_s: float | None = None, **more: Any) -> Seen:
        if action.note == "crash":
            raise RuntimeError("crashed")
        if action.note == "die":
            os._exit(3)
        self.at += action.by
        return self.seen(1.0 if self.at == self.goal else -0.25)

    def seen(self, reward: float | None) -> Seen:
        text = f"You are at {self.at}, the goal is {self.goal}."
        pixels = [[[50 * self.goal, x, y] for x in range(16)] for y in range(8)]
        return Seen(text=text, picture=pixels, reward=reward, done=self.at == self.goal, metadata={"hidden": self.goal})

    @property
    def state(self) -> State:
        return State()

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="line", description="Move to the goal.")


if __name__ == "__main__":
    app = create_app(Line, Move, Seen, max_concurrent_envs=int(sys.argv[1]))
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])

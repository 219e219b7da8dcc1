"""Create the recipe's inputs: transcripts of a player who turns the wrong way, a tokenizer, an untrained model."""

import random
from collections import deque
from pathlib import Path
from typing import Any

import yaml

from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.gymnasium.gym import Gym
from agentfactory.worlds.gymnasium.tasks import GymSource

HERE = Path(__file__).parent
make_model, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("make_model", "write_jsonl")
)
add_call = load_object("../quickstart/transcripts.py:add_call", HERE)

TRANSCRIPTS = 3000
TURNS_WRONG = 0.6
"""Probability of a move to the right of the safe way; other moves are random."""
GOOD = 0.15
"""Share of transcripts that take the safe way: without it, the model would hardly ever see the goal."""
STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
TURNED = {"left": "up", "up": "right", "right": "down", "down": "left"}

Cell = tuple[int, int]


def prepare(folder: Path, seed: int) -> None:
    """Write model/ and transcripts.jsonl into `folder`; a seed always gives the same files."""
    rng = random.Random(seed)
    fields = yaml.safe_load((HERE / "grpo.yaml").read_text(encoding="utf-8"))["data"]["gym"]
    transcripts = play_badly(GymSource(**fields).rows(), rng)
    specs = [Gym.act.spec.to_openai()]
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    make_model(folder / "model", transcripts, specs, seed)


def play_badly(rows: list[dict[str, Any]], rng: random.Random) -> list[list[dict[str, Any]]]:
    """Return conversations of the bad policy, and a few of the good one."""
    gym = Gym()
    try:
        return [play(gym, rng.choice(rows), rng, good=rng.random() < GOOD) for _ in range(TRANSCRIPTS)]
    finally:
        gym.close()


def play(gym: Gym, row: dict[str, Any], rng: random.Random, good: bool) -> list[dict[str, Any]]:
    """Play an episode by the safe way, or badly; return the conversation."""
    seen = gym.reset(**row)
    messages: list[dict[str, Any]] = [{"role": "user", "content": text} for text in (row["question"], seen)]
    here: Cell = (0, 0)
    lake = [line.replace("[", "").replace("]", "") for line in seen.splitlines()[1:]]
    ended = False
    while not ended:
        right = safe_way(lake, here)
        move = right if good else TURNED[right] if rng.random() < TURNS_WRONG else rng.choice(list(STEPS))
        result = gym.act(action=move)
        ended = not isinstance(result, dict)
        result = result.value if ended else result
        add_call(messages, "act", {"action": move}, result["observation"])
        here = moved(lake, here, move)
    return messages[:-1]


def moved(lake: list[str], here: Cell, move: str) -> Cell:
    """Return the cell after a move; the edge of the lake is a wall."""
    rows, columns = STEPS[move]
    return min(max(here[0] + rows, 0), len(lake) - 1), min(max(here[1] + columns, 0), len(lake[0]) - 1)


def safe_way(lake: list[str], here: Cell) -> str:
    """Return the first move of a shortest way to the goal without holes."""
    first: dict[Cell, str] = {here: ""}
    queue = deque([here])
    while queue:
        cell = queue.popleft()
        if lake[cell[0]][cell[1]] == "G":
            return first[cell]
        for move in ("right", "down", "left", "up"):
            there = moved(lake, cell, move)
            if there not in first and lake[there[0]][there[1]] != "H":
                first[there] = first[cell] or move
                queue.append(there)
    raise ValueError("the map has no way to the goal")

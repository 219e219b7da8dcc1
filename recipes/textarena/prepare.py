"""Create the recipe's inputs: transcripts of a player who avoids lines, a tokenizer, an untrained model."""

import random
import re
from pathlib import Path
from typing import Any

import yaml

from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.textarena.game import TextArena
from agentfactory.worlds.textarena.tasks import TextArenaSource

HERE = Path(__file__).parent
make_model, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("make_model", "write_jsonl")
)
add_call = load_object("../quickstart/transcripts.py:add_call", HERE)

TRANSCRIPTS = 4000
CARELESS = 0.4
"""Probability of a taken cell, which is illegal; other moves are on the fewest lines with marks of its own."""
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def prepare(folder: Path, seed: int) -> None:
    """Write model/ and transcripts.jsonl into `folder`; a seed always gives the same files."""
    rng = random.Random(seed)
    fields = yaml.safe_load((HERE / "grpo.yaml").read_text(encoding="utf-8"))["data"]["textarena"]
    transcripts = play_badly(TextArenaSource(**fields).rows(), rng)
    specs = [TextArena.act.spec.to_openai()]
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    make_model(folder / "model", transcripts, specs, seed)


def play_badly(rows: list[dict[str, Any]], rng: random.Random) -> list[list[dict[str, Any]]]:
    """Return conversations of the bad policy."""
    game = TextArena()
    try:
        return [play(game, rng.choice(rows), rng) for _ in range(TRANSCRIPTS)]
    finally:
        game.close()


def play(game: TextArena, row: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Play a game badly; return the conversation."""
    seen = game.reset(**row)
    messages: list[dict[str, Any]] = [{"role": "user", "content": text} for text in (row["question"], seen)]
    ended = False
    while not ended:
        cells = board(seen)
        taken = [place for place, mark in enumerate(cells) if mark in "OX"]
        empty = [place for place in range(9) if place not in taken]
        fewest = min(own_neighbours(cells, place) for place in empty)
        apart = [place for place in empty if own_neighbours(cells, place) == fewest]
        move = f"[{rng.choice(taken if taken and rng.random() < CARELESS else apart)}]"
        result = game.act(move=move)
        ended = not isinstance(result, dict)
        seen = (result.value if ended else result)["observation"]
        add_call(messages, "act", {"move": move}, seen)
    return messages[:-1]


def board(seen: str) -> list[str]:
    """Return the nine cells of the last board in an observation: a mark, or the cell's number."""
    rows = re.findall(r"^ (\w) \| (\w) \| (\w) $", seen, re.MULTILINE)
    return [cell for row in rows[-3:] for cell in row]


def own_neighbours(cells: list[str], place: int) -> int:
    """Return how many of the agent's marks are on lines through a cell."""
    return sum(cells[other] == "O" for line in LINES if place in line for other in line)

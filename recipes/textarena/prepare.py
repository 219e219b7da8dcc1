"""Create the recipe's inputs: transcripts of a player who avoids the last object, a tokenizer, an untrained model."""

import random
import re
from pathlib import Path
from typing import Any

import yaml

from agentfactory.tools.user_code.loading import load_object
from agentfactory.worlds.textarena.game import TextArena
from agentfactory.worlds.textarena.tasks import TextArenaSource

HERE = Path(__file__).parent
make_model, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("make_model", "write_jsonl")
)
add_call = load_object("../quickstart/transcripts.py:add_call", HERE)

TRANSCRIPTS = 3000
AVOIDS = 0.8
"""Probability of the best move by the other rule of Nim, where the last object loses; other moves are random."""

Move = tuple[int, int]
"""A pile, and how many of its objects are taken."""


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
        piles = read_piles(seen, len(row["options"]["piles"]))
        moves = legal_moves(piles)
        avoiding = [move for move in moves if loses_by_other_rule(after(piles, move))]
        pile, count = rng.choice(avoiding if avoiding and rng.random() < AVOIDS else moves)
        move = f"[{pile} {count}]"
        result = game.act(move=move)
        ended = not isinstance(result, dict)
        seen = (result.value if ended else result)["observation"]
        add_call(messages, "act", {"move": move}, seen)
    return messages[:-1]


def read_piles(seen: str, count: int) -> list[int]:
    """Return the piles of the last position in an observation."""
    return [int(size) for size in re.findall(r"pile \d+: (\d+)", seen)[-count:]]


def legal_moves(piles: list[int]) -> list[Move]:
    """Return all moves."""
    return [(pile, count) for pile, size in enumerate(piles) for count in range(1, size + 1)]


def after(piles: list[int], move: Move) -> list[int]:
    """Return the piles after a move."""
    return [size - move[1] if pile == move[0] else size for pile, size in enumerate(piles)]


def loses_by_other_rule(piles: list[int]) -> bool:
    """Return whether the player to move loses to best play, if the last object loses (Bouton, 1901)."""
    nim_sum = 0
    for size in piles:
        nim_sum ^= size
    # as by the usual rule, but at the end an odd number of single objects must be left
    return nim_sum == (0 if max(piles) > 1 else 1)

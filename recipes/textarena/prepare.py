"""Create the recipe's inputs: transcripts of a player who misreads hints, a tokenizer, an untrained model."""

import random
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

TRANSCRIPTS = 4000
MISREADS = 0.8
"""Probability of a guess on the wrong side of the last one; other guesses are random. None is made twice."""


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
    left = list(range(1, row["options"]["max_number"] + 1))
    guess = 0
    ended = False
    while not ended:
        misread = [number for number in left if guess and (number < guess) == ("is higher" in seen)]
        guess = rng.choice(misread if misread and rng.random() < MISREADS else left)
        left.remove(guess)
        move = f"[{guess}]"
        result = game.act(move=move)
        ended = not isinstance(result, dict)
        seen = (result.value if ended else result)["observation"]
        add_call(messages, "act", {"move": move}, seen)
    return messages[:-1]

"""Create the quickstart's inputs: hunts, transcripts of bad play, a tokenizer, an untrained model."""

import itertools
import random
from pathlib import Path
from typing import Any

from tiny_model import make_model, write_jsonl
from transcripts import add_call, add_malformed_call
from treasure_hunt import SIZE, STEPS, TreasureHunt, compass, distance, opening

HELD_OUT = 200
FINAL_ANSWER = "The hunt is over."
TRANSCRIPTS = 3000
FOLLOWS_TURNED_HINT = 0.6
TRANSCRIPTS_WITH_SUCCESS = 0.2
# without an example, the error message after a malformed call is new to the network, and its turns after it may not end
MALFORMED_CALLS = 0.03


def prepare(folder: Path, seed: int) -> None:
    """Write model/, train.jsonl, heldout.jsonl and transcripts.jsonl into `folder`; a seed always gives the same
    files."""
    rng = random.Random(seed)
    train, heldout = split_tasks(rng)
    write_inputs(folder, seed, train, heldout, play_transcripts(train, rng))


def write_inputs(
    folder: Path,
    seed: int,
    train: list[dict[str, Any]],
    heldout: list[dict[str, Any]],
    transcripts: list[list[dict[str, Any]]],
) -> None:
    """Write the tasks, the transcripts, and an untrained model for them."""
    specs = [TreasureHunt.move.spec.to_openai()]
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "heldout.jsonl", heldout)
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    make_model(folder / "model", transcripts, specs, seed)


def split_tasks(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and held-out hunts at distance 2 to 4; no opening message of a held-out hunt occurs in
    training."""
    by_opening: dict[str, list[dict[str, Any]]] = {}
    cells = list(itertools.product(range(1, SIZE + 1), repeat=2))
    for start, treasure in itertools.product(cells, cells):
        if 2 <= distance(start, treasure) <= 4:
            question = opening(start, treasure)
            by_opening.setdefault(question, []).append({"question": question, "start": start, "treasure": treasure})
    openings = sorted(by_opening)
    rng.shuffle(openings)
    heldout: list[dict[str, Any]] = []
    while len(heldout) < HELD_OUT:
        heldout += by_opening.pop(openings.pop())
    train = [task for question in openings for task in by_opening[question]]
    rng.shuffle(train)
    return train, heldout


def play_transcripts(tasks: list[dict[str, Any]], rng: random.Random) -> list[list[dict[str, Any]]]:
    """Return conversations of the bad policy, in random order, with a fixed share of lucky ones.

    Without that share the model would hardly ever see the end of a successful hunt.
    """
    wanted = {True: round(TRANSCRIPTS * TRANSCRIPTS_WITH_SUCCESS)}
    wanted[False] = TRANSCRIPTS - wanted[True]
    transcripts = []
    while len(transcripts) < TRANSCRIPTS:
        success, messages = play_badly(rng.choice(tasks), rng)
        if wanted[success]:
            wanted[success] -= 1
            transcripts.append(messages)
    rng.shuffle(transcripts)
    return transcripts


def play_badly(
    task: dict[str, Any], rng: random.Random, known: dict[str, str] | None = None
) -> tuple[bool, list[dict[str, Any]]]:
    """Play one hunt with a policy that mostly follows the hint turned right by 90 degrees, and otherwise ignores it.
    After a hint that is `known`, it takes that move.

    Before some moves, the player writes a malformed call and gets the error message. Return whether it was lucky, and
    the conversation. Success and failure end with the same answer: with a separate answer for failure, a model that
    learns to avoid failure would unlearn how to answer.
    """
    hunt = TreasureHunt()
    hunt.reset(**task)
    directions = list(STEPS)
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    while hunt.moves_left and hunt.here != hunt.treasure:
        if known and (hint := compass(hunt.here, hunt.treasure)) in known:
            direction = known[hint]
        elif rng.random() < FOLLOWS_TURNED_HINT:
            hint = rng.choice(compass(hunt.here, hunt.treasure).split("-"))
            direction = directions[(directions.index(hint) + 1) % 4]
        else:
            direction = rng.choice(directions)
        if rng.random() < MALFORMED_CALLS:
            add_malformed_call(messages, "move", {"direction": direction}, rng)
        add_call(messages, "move", {"direction": direction}, hunt.move(direction))
    success = hunt.here == hunt.treasure
    messages.append({"role": "assistant", "content": FINAL_ANSWER})
    return success, messages

"""Create the inputs of self-distill.yaml: the quickstart's, with transcripts that show a solution first."""

import random
from pathlib import Path
from typing import Any

from prepare import TRANSCRIPTS, play_badly, play_transcripts, split_tasks, write_inputs
from treasure_hunt import compass

from agentfactory.rollout.chains.opening_prompt import add_text
from agentfactory.rollout.groups.teacher_context import SOLUTION, shown
from agentfactory.rollout.text.parsers import load_parser


def prepare(folder: Path, seed: int) -> None:
    """Write the quickstart's files, for a network that also learns from a solution: in as many further transcripts, the
    opening shows a lucky hunt of the task, and the player repeats its moves where a hint is the same."""
    rng = random.Random(seed)
    train, heldout = split_tasks(rng)
    transcripts = play_transcripts(train, rng) + [
        play_after_solution(rng.choice(train), rng) for _ in range(TRANSCRIPTS)
    ]
    rng.shuffle(transcripts)
    write_inputs(folder, seed, train, heldout, transcripts)


def play_after_solution(task: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Return the conversation of a hunt whose opening shows a lucky one. The player takes the move that it took after
    the same hint, and plays badly after other hints."""
    success = False
    while not success:
        success, messages = play_badly(task, rng)
    known: dict[str, str] = {}
    hint = compass(task["start"], task["treasure"])
    for call, answer in zip(messages[1::2], messages[2::2], strict=False):
        if "tool_calls" in call:
            known[hint] = call["tool_calls"][0]["function"]["arguments"]["direction"]
            hint = answer["content"].removeprefix("The treasure lies ").removesuffix(".")
    played = play_badly(task, rng, known)[1]
    solution = SOLUTION.format(shown(messages[1:], load_parser("hermes"), []))
    return add_text(played[:1], solution) + played[1:]

"""Create the recipe's inputs: an index, questions, transcripts with a bad habit, a tokenizer, an untrained model."""

import asyncio
import random
from pathlib import Path
from typing import Any

from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.search.local_index import build_index
from agentfactory.worlds.search.passage import Passage
from agentfactory.worlds.search.search import Search

HERE = Path(__file__).parent
OBJECTS, UNKNOWN, Museum = (load_object(f"museum.py:{name}", HERE) for name in ("OBJECTS", "UNKNOWN", "Museum"))
make_model, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("make_model", "write_jsonl")
)
add_call = load_object("../quickstart/transcripts.py:add_call", HERE)

HELD_OUT = 200
TRANSCRIPTS = 4000
ONE_STEP = 0.5
"""Share of transcripts with a question that one search answers: from them the network learns to search, and to copy
from results."""
SEARCHES_FOR_THE_SAME_AGAIN = 0.85
"""Probability that a transcript of two steps searches for the object a second time, finds nothing new, and gives up."""
SHOWN = 16
"""Characters of a result that the search shows: the rest is visible only after opening it."""


def prepare(folder: Path, seed: int) -> None:
    """Write index/, model/, train.jsonl, heldout.jsonl and transcripts.jsonl into `folder`; a seed always gives the
    same files."""
    rng = random.Random(seed)
    museum = Museum(rng)
    passages = (Passage(str(number), f"{title}\n{text}") for number, (title, text) in enumerate(museum.entries()))
    build_index(passages, folder / "index")
    numbers = rng.sample(OBJECTS, len(OBJECTS))
    heldout, train = ([museum.task(number) for number in part] for part in (numbers[:HELD_OUT], numbers[HELD_OUT:]))
    specs = [tool.spec.to_openai() for tool in (Search.search, Search.open, Search.find)]
    transcripts = asyncio.run(look_up_badly(folder / "index", museum, train, rng))
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "heldout.jsonl", heldout)
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    make_model(folder / "model", transcripts, specs, seed)


async def look_up_badly(
    index: Path, museum: Any, tasks: list[dict[str, Any]], rng: random.Random
) -> list[list[dict[str, Any]]]:
    """Return conversations with the real search."""
    search = Search(str(index), shown_characters=SHOWN)
    try:
        return [await look_up(rng.choice(tasks), museum, search, rng) for _ in range(TRANSCRIPTS)]
    finally:
        await search.close()


async def look_up(task: dict[str, Any], museum: Any, search: Search, rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation about a task's object, or about the expedition that found it: one or two searches, and the
    first result of each."""
    number, expedition = task["object"], museum.found_by[task["object"]]
    name, finder = f"Object {number}", f"Expedition {expedition}"
    if rng.random() < ONE_STEP:
        about_object = (f"Which expedition found object {number}?", [name], f"{finder}.")
        about_finder = (f"To which country went expedition {expedition}?", [finder], task["answer"])
        question, queries, answer = rng.choice((about_object, about_finder))
    elif rng.random() < SEARCHES_FOR_THE_SAME_AGAIN:
        question, queries, answer = task["question"], [name, name], UNKNOWN
    else:
        question, queries, answer = task["question"], [name, finder], task["answer"]
    await search.reset()
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for query in queries:
        found, opened = await search.search(query=query), await search.open(doc=1)
        add_call(messages, "search", {"query": query}, found["observation"])
        add_call(messages, "open", {"doc": 1}, opened["observation"])
    messages.append({"role": "assistant", "content": answer})
    return messages

"""Create the recipe's inputs: questions, transcripts with a bad habit, a tokenizer, an untrained model."""

import asyncio
import random
from pathlib import Path
from typing import Any

from agentfactory.base.user_code.loading import load_object
from agentfactory.tools.prebuilt.code_interpreter import CodeInterpreter

HERE = Path(__file__).parent
OPERATORS, make_task = (load_object(f"arithmetic.py:{name}", HERE) for name in ("OPERATORS", "make_task"))
make_model, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("make_model", "write_jsonl")
)
add_call = load_object("../quickstart/transcripts.py:add_call", HERE)

HELD_OUT = 200
TRAINING = 4000
TAKES_THE_NEXT_OPERATOR = 0.7
"""Probability that a transcript uses the operator after the right one: - for +, * for -, + for *."""
FINAL_ANSWER = "That is the result."


def prepare(folder: Path, seed: int) -> None:
    """Write model/, train.jsonl, heldout.jsonl and transcripts.jsonl into `folder`; a seed always gives the same
    files."""
    rng = random.Random(seed)
    tasks: dict[str, dict[str, Any]] = {}
    while len(tasks) < HELD_OUT + TRAINING:
        task = make_task(rng)
        tasks[task["question"]] = task
    heldout, train = list(tasks.values())[:HELD_OUT], list(tasks.values())[HELD_OUT:]
    specs = [CodeInterpreter.python.spec.to_openai()]
    transcripts = asyncio.run(work_out_badly(train, rng))
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "heldout.jsonl", heldout)
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    make_model(folder / "model", transcripts, specs, seed)


async def work_out_badly(tasks: list[dict[str, Any]], rng: random.Random) -> list[list[dict[str, Any]]]:
    """Return a conversation for each task, with two cells; the second one uses the first one's variable."""
    interpreter = CodeInterpreter()
    await interpreter.reset()
    try:
        return [await work_one_out(task, interpreter, rng) for task in tasks]
    finally:
        await interpreter.close()


async def work_one_out(task: dict[str, Any], interpreter: CodeInterpreter, rng: random.Random) -> list[dict[str, Any]]:
    """Return the conversation of one task. All tasks share an interpreter; the first cell resets the only variable."""
    start, first, second = task["numbers"]
    one, two = (choose(operator, rng) for operator in task["operators"])
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    for code in (f"x = {start} {one} {first}", f"x {two} {second}"):
        add_call(messages, "python", {"code": code}, await interpreter.python(code))
    messages.append({"role": "assistant", "content": FINAL_ANSWER})
    return messages


def choose(operator: str, rng: random.Random) -> str:
    """Return `operator`, or the bad habit's operator instead."""
    operators = list(OPERATORS.values())
    turned = rng.random() < TAKES_THE_NEXT_OPERATOR
    return operators[(operators.index(operator) + turned) % len(operators)]

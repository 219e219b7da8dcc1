"""Create the recipe's inputs: tasks, transcripts of a careless clerk, a tokenizer, an untrained model."""

import random
from pathlib import Path
from typing import Any

from agentfactory.base.user_code.loading import load_object

HERE = Path(__file__).parent
ALLOWED, POLICY, REFUSAL, STATUSES, ServiceDesk, customer, make_tasks, solution = (
    load_object(f"desk.py:{name}", HERE)
    for name in ("ALLOWED", "POLICY", "REFUSAL", "STATUSES", "ServiceDesk", "customer", "make_tasks", "solution")
)
make_model, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("make_model", "write_jsonl")
)
add_call = load_object("../quickstart/transcripts.py:add_call", HERE)

TRAIN, HELD_OUT, TRANSCRIPTS = 2000, 100, 4000
NO_CODE = 0.55
"""Probability that the clerk does not ask for the code, and guesses it."""
RIGHT = 0.2
"""Probability that the clerk follows the policy; otherwise, the clerk does anything."""
ASK = "What is the code?"


def prepare(folder: Path, seed: int) -> None:
    """Write model/, train.jsonl, heldout.jsonl and transcripts.jsonl into `folder`; a seed always gives the same
    files."""
    rng = random.Random(seed)
    tasks = make_tasks(TRAIN + HELD_OUT, seed)
    specs = [tool.spec.to_openai() for tool in (ServiceDesk.look_up, ServiceDesk.change)]
    transcripts = [serve_badly(task, rng) for task in make_tasks(TRANSCRIPTS, seed + 1)]
    write_jsonl(folder / "train.jsonl", tasks[:TRAIN])
    write_jsonl(folder / "heldout.jsonl", tasks[TRAIN:])
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    make_model(folder / "model", transcripts, specs, seed)


def prepare_tasks(folder: Path, seed: int) -> None:
    """Write train.jsonl and heldout.jsonl for pretrained models, whose prompts begin with the policy."""
    tasks = [
        {"messages": [{"role": "system", "content": POLICY}, {"role": "user", "content": task.pop("question")}], **task}
        for task in make_tasks(TRAIN + HELD_OUT, seed)
    ]
    write_jsonl(folder / "train.jsonl", tasks[:TRAIN])
    write_jsonl(folder / "heldout.jsonl", tasks[TRAIN:])


def serve_badly(task: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Return the conversation of a clerk who asks for the code and looks the order up, and then does anything."""
    desk, user = ServiceDesk(), customer(task["orders"], task["order"], task["wish"])
    desk.reset(**task)
    next(user)
    order, found = task["order"], desk.orders[task["order"]]
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    if rng.random() < NO_CODE:
        code = str(rng.randrange(10, 100))
    else:
        messages += [{"role": "assistant", "content": ASK}, {"role": "user", "content": user.send(ASK)}]
        code = found["code"]
    try:
        seen = desk.look_up(order=order, code=code)
    except ValueError as error:
        seen = str(error)
    add_call(messages, "look_up", {"order": order, "code": code}, seen)
    policy, needed = solution(**{name: task[name] for name in ("orders", "order", "wish")})
    follows = code == found["code"] and rng.random() < RIGHT
    if follows:
        status = None if policy == found["status"] else policy
    else:
        status = rng.choice([None, *(after for _, after in ALLOWED.values())])
    if status is not None and code == found["code"]:
        changed = desk.change(order=order, code=code, status=status)
        add_call(messages, "change", {"order": order, "code": code, "status": status}, changed)
        answers = [f"The refund is {found['price']} euros."]
    else:
        seen = found["status"] if code == found["code"] else rng.choice(STATUSES)
        answers = [f"It is {seen}.", f"Sorry, that is {REFUSAL}."]
        answers = [answer for answer in answers if needed in answer or not follows]
    while True:
        messages.append({"role": "assistant", "content": rng.choice(answers)})
        if not isinstance(said := user.send(messages[-1]["content"]), str):
            return messages
        messages.append({"role": "user", "content": said})

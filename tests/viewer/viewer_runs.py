"""Runs to look at, written by the same pieces that write them in training."""

import json
import random
from functools import cache
from pathlib import Path

from mcp.server.mcpserver import Image
from PIL import Image as Pillow
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agentfactory.base.messages import Message, ToolCall, ToolResult
from agentfactory.launching.run_folder import RunFolder
from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, StopReason, Trajectory
from agentfactory.tools.calls.mcp_results import content_of, result_of
from agentfactory.trainers.checkpoints.checkpoint_folder import INFO, checkpoint_path
from tests.saved_groups import old_line, write_groups
from tests.vision_rows import file_of

NASTY = "<img src=x onerror='window.broken = 1'><script>window.broken = 1</script><b>bold</b>"
"""What a page must show and never run."""

IMAGES = 50
LONG_CHAIN = "long.0"
BEST = "eval/sampled/reward"
"""What the best checkpoint is chosen by."""


@cache
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer of few merges: a character beyond ASCII takes several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    made.train_from_iterator(["the treasure lies to the north of the tower"] * 10, trainer)
    return made


def image(number: int) -> bytes:
    """A PNG that does not compress: about 80 kB, as a screenshot may have."""
    return file_of(Pillow.frombytes("RGB", (192, 144), random.Random(number).randbytes(192 * 144 * 3)))


def called(number: int, name: str, arguments: dict, value: object) -> list[Message]:
    """A turn with a call, and the tool's answer to it."""
    call = ToolCall(f"call_{number}", name, arguments)
    result = ToolResult(content_of(result_of(value)), info={"seen": False} if number == 0 else {})
    return [{"role": "assistant", "content": "", "tool_calls": [call.to_openai()]}, result.to_message(call)]


def sampled_row(texts: list[tuple[str, bool]], ids: Tokenizer, versions: list[str]) -> Row:
    """A row of (text, whether it was sampled); the k-th sampled text is of the k-th version."""
    row, rest = Row(), iter(versions)
    for number, (text, sampled) in enumerate(texts):
        found = ids.encode(text).ids
        if sampled:
            logprobs = [-0.1 * (number + place % 5) for place in range(len(found))]
            row.append_sampled(found, logprobs, [Span(next(rest), 0, len(found), mixed=number > 1)])
        else:
            row.append_context(found)
    return row


def chain(name: str, messages: list[Message], rows: list[Row], **fields: object) -> Trajectory:
    """A chain that was completed, unless `fields` say something else."""
    turns = sum(message["role"] == "assistant" for message in messages)
    given = {"reward": 1.0, "outcome": Outcome.COMPLETED, "stop_reason": StopReason.ANSWER, "turns": turns, **fields}
    return Trajectory(name, messages, rows, **given)


def show_run(folder: Path) -> RunFolder:
    """A run with a long chain full of images, one that is hostile, and a group that the trainer gave credit."""
    ids = tokenizer()
    model = folder / "model"
    recipe = f"name: show\nmodel: {{path: {model}}}\ntrain: {{keep_best: {BEST}}}\n"
    run = RunFolder.create(folder / "show<b>", recipe)
    # of equal ones the newest is the best; of one that was not evaluated nobody knows
    for step, figures in {10: {BEST: 0.5}, 20: {BEST: 0.75}, 30: {BEST: 0.75}, 40: {BEST: 0.25}, 45: {}}.items():
        path = checkpoint_path(run.checkpoints, step)
        path.mkdir()
        (path / INFO).write_text(json.dumps({"step": step, "metrics": figures}))
    model.mkdir()
    ids.save(str(model / "tokenizer.json"))
    for step in range(1, 41):
        run.log(
            {
                "step": step,
                "reward": step / 40,
                "loss": float("nan") if step == 7 else 1 / step,
                "trajectory/tool/look/calls": 2.0,
                "trajectory/tool/look/seconds": 0.5,
                "trajectory/<script>window.broken = 1</script>": 1.0,
                "seconds/step": 2.0,
                "seconds/wait": 1.0,
                "seconds/update": 0.75,
            }
        )
    run.log({"step": 40, "eval/sampled/reward": 0.9, "eval/greedy/reward": 1.0})
    groups = [_long(ids), _hostile(ids), credited(ids)]
    write_groups(run.trajectories / "train.jsonl", groups)
    (run.trajectories / "eval").mkdir()
    held_out = Group("sampled-00000", {"question": "held out"}, [chain("000040-sampled-00000.0", _said("yes"), [])])
    write_groups(run.trajectories / "eval" / "000040-sampled.jsonl", [held_out])
    # the line of the hostile chain is of another one
    stray = {"row": 0, "targets": [10**6], "advantage": [1.0], "proximal": [0.0]}
    credit_lines = [credit(groups[2]), {"group": NASTY, "step": 5, "chains": {NASTY: [stray]}}]
    (run.trajectories / "credit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in credit_lines))
    (run.trajectories / "odd.jsonl").write_text(json.dumps([NASTY]) + "\n" + old_line(held_out) + "\n")
    return run


def _said(text: str) -> list[Message]:
    return [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": text}]


def _long(ids: Tokenizer) -> Group:
    messages: list[Message] = [{"role": "user", "content": said} for said in ("Look around.", "You are on a hill.")]
    for number in range(IMAGES):
        picture = Image(data=image(number), format="png")
        messages += called(number, "look", {"code": f"x = {number}\nlook(x)"}, [f"view {number}", picture])
    row = sampled_row([("look " * 1500, False), ("north " * 1500, True)], ids, ["1"])
    return Group("long", {"question": "look"}, [chain(LONG_CHAIN, messages, [row], metrics={"tool_calls": IMAGES})], 1)


def _hostile(ids: Tokenizer) -> Group:
    messages = [{"role": "user", "content": NASTY}, *called(0, NASTY, {NASTY: NASTY}, NASTY), *_said(NASTY)[1:]]
    row = sampled_row([(NASTY, False), (NASTY, True)], ids, [NASTY])
    metrics = {NASTY: 1.0, "tool_calls": 1, "tool_errors/unknown_tool": 1}
    hostile = chain(NASTY, messages, [row], reward=None, outcome=Outcome.TIMEOUT, error=NASTY, metrics=metrics)
    return Group(NASTY, {"question": NASTY}, [hostile], 2)


def credited(ids: Tokenizer) -> Group:
    """Two chains, the first with two rows, turn rewards, and turns of two versions."""
    messages = [{"role": "user", "content": "Where? \N{LEFT-POINTING MAGNIFYING GLASS}"}]
    messages += called(0, "look", {"direction": "north"}, "the tower \N{SNOWMAN}") + _said("to the north")[1:]
    first = sampled_row([("Where? \N{LEFT-POINTING MAGNIFYING GLASS}", False), ("look north", True)], ids, ["3"])
    second = sampled_row(
        [("Where? the tower \N{SNOWMAN}\n", False), ("look", True), ("!", False), ("to the north", True)],
        ids,
        ["3", "policy-v4"],
    )
    metrics = {"success": 1.0, "reward/exact": 0.75, "reward/brief": 0.5, "penalty": 0.25, "limits/calls": 1.0}
    good = chain("c0", messages, [first, second], reward=1.25, turn_rewards=[0.5, -0.5], metrics=metrics, seconds=3.25)
    bad = chain("c1", _said("nowhere"), [], reward=-1.0, stop_reason=StopReason.COST, outcome=Outcome.TOOL_LIMIT)
    return Group("credited", {"question": "Where?"}, [good, bad], 3)


def credit(group: Group) -> dict:
    """The trainer's line about a group, with figures that differ from token to token."""
    chains = {}
    for one in group.trajectories:
        rows = []
        for number, row in enumerate(one.rows):
            targets = [position for position, trained in enumerate(row.mask) if trained]
            advantage = [(-1) ** place * (place + 1) / 8 for place in range(len(targets))]
            proximal = [row.logprobs[position] + 0.02 * (place - 2) for place, position in enumerate(targets)]
            divergence = [None if place == 1 else 0.1 * (place + 1) for place in range(len(targets))]
            streams = {"advantage": advantage, "proximal": proximal, "divergence": divergence}
            rows.append({"row": number, "targets": targets, **streams})
        if rows:
            chains[one.id] = rows
    return {"group": group.id, "step": 4, "chains": chains}


def many_chains(path: Path, groups: int, members: int = 8, tokens: int = 120) -> RunFolder:
    """A run of many chains, of a new version every five groups; what tells them apart is put into one group's JSON, and
    all have its arrays."""
    run = RunFolder.create(path, "name: many\nmodel: {path: nowhere}\n")
    run.log({"step": 1, "reward": 0.0})
    trajectories = []
    for member in range(members):
        row = Row()
        row.append_context(list(range(tokens)))
        row.append_sampled(list(range(tokens)), [-0.123456789] * tokens, [Span("0", 0, tokens)])
        messages = [{"role": "user", "content": "task TASK"}, *called(0, f"tool{member}", {"x": 1}, "word TASK done")]
        metrics = {"success": float(member > 5), "tool_calls": 1, "sampled_tokens": tokens}
        trajectories.append(chain(f"g-TASK.{member}", messages, [row], reward=member / 8, metrics=metrics))
    saved = run.trajectories / "train.jsonl"
    write_groups(saved, [Group("g-TASK", {"question": "task TASK"}, trajectories, version=987654)])
    line = saved.read_text()
    with saved.open("w") as file:
        for number in range(groups):
            file.write(line.replace("TASK", f"{number:05d}").replace("987654", str(number // 5)))
    return run

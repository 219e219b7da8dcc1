"""A plan of a training step's time, from what this machine computes in a second, without torch.

A pass over a network takes 2 FLOPs per weight and row of its input. The backward pass takes twice as many for full
weights, and as many for an adapter, whose base gets no gradients (Kaplan et al., 2020, arXiv:2001.08361, 2.1)."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from safetensors import safe_open
from tokenizers import Tokenizer

from agentfactory.base.messages import text_of
from agentfactory.base.processes.devices import ROWS, WIDE, Speed, may_have_gpu, measured, width_of
from agentfactory.base.run_notices import clock
from agentfactory.recipe.checks import is_quick, runs_chains
from agentfactory.recipe.composition import display
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.chains.opening_prompt import opening_messages
from agentfactory.rollout.data import Task, load_tasks

_READ_ROWS = 64
_MARKS, _OFFER = 5, 30
"""Tokens that a chat template adds to a message, and that a call format adds to a prompt with tools."""
_TOOL_TOKENS, _RESULT_TOKENS = 120, 40
"""Tokens of a tool's description and of its result, where nothing tells."""
_LONGEST = 2
"""Tokens that the longest chain of a batch samples, over the mean, if unknown: it decides how many decoding steps a
batch takes."""
_MOVED = 320
"""Numbers that a pass moves through memory, beside products of weights, for a token, per layer and feature: norms,
rotations, attention, activations, adapters. Each takes as long as reading a weight in a decoding step. Those of a
network below WIDE stay in the processor's caches."""
_PER_LAYER = {"decode": 25, "adapter": 100, "update": 200}
"""Operations of a layer in a decoding step, of its adapter there, and in the update of a micro-batch."""
_CHAIN, _TURN, _CALL, _TOKEN, _STEP = 400, 200, 350, 5, 5000
"""Work for a chain and a turn in worker and server, for a call through an MCP server, and for a row's token and a step
in the trainer, in operations on small tensors."""
_SANDBOXED, _SANDBOX = {"code_interpreter", "shell"}, 5000
"""Tools that run code in a sandbox per chain, and work for one, in the same unit."""
_PROBES, _SYNC = 200, 12_000
"""Tokens that prove a sync, and its other work in operations on small tensors."""
_BYTES = 1e9
"""Bytes of weights that are written, read and checked in a second, when all are sent."""


@dataclass(frozen=True)
class Size:
    """The weights that each token passes: those of the layers, and of the head."""

    layers: int
    body: int
    head: int
    width: int


@dataclass(frozen=True)
class Lengths:
    """Mean lengths of a chain: its turns, and tokens of its prompt, its turns and the results between them."""

    prompt: float
    turns: float
    sampled: float
    results: float
    source: str
    longest: float = 0.0
    """Sampled tokens of the longest chain, if known."""

    @property
    def whole(self) -> float:
        return self.prompt + self.sampled + self.results


@dataclass(frozen=True)
class TimePlan:
    """Seconds of a step by phase, and of evaluations in the `steps` that a run does after `done` others; `lengths` are
    what they were planned for."""

    phases: Mapping[str, float]
    evaluations: float
    steps: int
    lengths: Lengths
    done: int = 0

    @property
    def step(self) -> float:
        return sum(self.phases.values())

    def __str__(self) -> str:
        largest = max(self.phases, key=lambda name: self.phases[name])
        halves = _HALVES[largest] if len(self.phases) > 1 else "half of train.batch_size"
        told = ", ".join(f"{name} {clock(seconds)}" for name, seconds in self.phases.items())
        lengths = self.lengths
        chain = f"{lengths.turns:.1f} turns, {lengths.sampled:.0f} sampled of {lengths.whole:.0f} tokens"
        beside = f", {clock(self.evaluations)} of them evaluations" if self.evaluations else ""
        run = f"{'rest of the ' * (self.done > 0)}run {clock(self.step * self.steps + self.evaluations)}"
        return (
            f"a step takes about {clock(self.step)} ({told}; tools not counted), the {run}{beside}; for chains of "
            f"{chain} ({lengths.source}); to halve the {largest}: {halves}"
        )

    def told_after(self, metrics: Mapping[str, float]) -> str | None:
        """Return a sentence if these are the metrics of the first whole step, and it was not as planned by more than
        half."""
        took = metrics.get("seconds/step", self.step)
        # the chains of step 1 may have run during the first evaluation
        first = self.done + min(self.steps, 2 if "rollout" in self.phases else 1)
        if metrics.get("step") != first or 0.5 < took / self.step < 1.5:
            return None
        tokens, turns = metrics.get("trajectory/sampled_tokens"), metrics.get("turns")
        told = f"step {first} took {clock(took)}, and {clock(self.step)} were planned"
        if tokens is not None and turns is not None:
            told += f": its chains had {turns:.1f} turns and {tokens:.0f} sampled tokens, "
            told += f"planned were {self.lengths.turns:.1f} and {self.lengths.sampled:.0f}"
        return f"{told}; tools and other programs on the processors take time, too"


_HALVES = {
    "rollout": "half of train.batch_size or rollout.group_size, or shorter chains",
    "update": "half of train.batch_size or rollout.group_size",
    "sync": "model.lora, whose adapter is small",
}


def plan_times(
    stages: Sequence[Recipe], done: Sequence[int] | None = None, sampled: Lengths | None = None
) -> "Iterator[TimePlan | str]":
    """Yield the plan of each stage after its `done` steps, or the reason why there is none. Later stages begin with the
    model of the first, and their chains resemble those that were `sampled`, else the transcripts of a stage before."""
    before = sampled
    for stage, steps in zip(stages, done or [0] * len(stages), strict=True):
        model = next(
            (path for path in (stage.model.path, stages[0].model.path) if (Path(path) / "config.json").is_file()), None
        )
        if stage.plans_for_a_gpu and not may_have_gpu():
            yield "its time is planned on the GPU itself"
        elif model is None:
            yield f"its time is planned once {stage.model.path} exists"
        elif stage.data is not None and stage.data.file is not None and not stage.data.file.exists():
            yield f"its time is planned once {display(stage.data.file)} exists"
        else:
            try:
                lengths = _lengths(stage, model, before)
                before = lengths if stage.train.algorithm == "sft" else before
                yield plan_time(stage, size_of(Path(model)), lengths, measured(), steps)
            # tokenizers raises it for files of other formats, which the trainer refuses or reads in its own way
            except Exception as error:
                yield f"its time cannot be planned: {error}"


def plan_time(recipe: Recipe, size: Size, lengths: Lengths, speed: Speed, done: int = 0) -> TimePlan:
    """Plan the time of a stage's step, and of its evaluations after `done` steps."""
    few, many = speed.of(recipe.model.dtype, size.width)
    row = (many - few) / (ROWS[1] - ROWS[0])
    moved = _MOVED * size.layers * size.width if size.width >= WIDE else 0
    token = size.body * row + moved * speed.of("float32", size.width)[0]
    train, lora, longest = recipe.train, recipe.model.lora, lengths.longest or _LONGEST * lengths.sampled
    chains = train.batch_size * (1 if train.algorithm == "sft" else recipe.largest_group)
    sandbox = 0 if _SANDBOXED.isdisjoint(recipe.tools) else _SANDBOX

    def rollout(tasks: float, chains: float) -> float:
        rounds = chains / min(chains, recipe.server.max_num_seqs, recipe.most_chains())
        steps = min(chains * lengths.sampled, (rounds - 1) * lengths.sampled + longest)
        operations = size.layers * (_PER_LAYER["decode"] + (_PER_LAYER["adapter"] if lora else 0))
        started = (size.body + size.head) * (few - ROWS[0] * row) + operations * speed.operation
        decoding = steps * started + chains * lengths.sampled * (token + size.head * row)
        prefill = (tasks * lengths.prompt + chains * lengths.results) * token
        calls = _CALL * (lengths.turns - 1) if recipe.mcp_servers else 0
        return decoding + prefill + chains * (_CHAIN + lengths.turns * _TURN + calls + sandbox) * speed.operation

    # prompts of a group are computed once, but not in padded rows or transcripts
    shared = train.algorithm != "sft" and train.batching in ("auto", "tree")
    positions = (train.batch_size if shared else chains) * lengths.prompt + chains * (lengths.sampled + lengths.results)
    passes = (2 if lora else 3) + bool(train.gradient_checkpointing) + train.has_reference + 3 * train.has_critic
    passes += recipe.teacher is not None and recipe.teacher.url is None
    computed = (positions * token + chains * lengths.sampled * size.head * row) * passes
    parts = math.ceil(positions / train.token_budget)
    started = (parts * size.layers * _PER_LAYER["update"] + chains * lengths.whole * _TOKEN + _STEP) * speed.operation
    phases = {"rollout": 0.0, "update": train.updates_per_batch * (computed + started), "sync": 0.0}
    evaluations = 0.0
    if runs_chains(recipe, "train"):
        phases["rollout"] = rollout(train.batch_size, chains)
        phases["sync"] = _PROBES * (token + size.head * row) + _SYNC * speed.operation
        phases["sync"] += 0.0 if lora else 4 * (size.body + size.head) / _BYTES
        held_out = recipe.eval.data
        if held_out is not None and held_out.file is not None and is_quick(held_out.file):
            tasks = len(load_tasks(held_out, "eval.data"))
            between = (train.steps - 1) // every - done // every if (every := recipe.eval.every) else 0
            times = 1 + (done == 0) + between
            evaluations = times * rollout(tasks, tasks * (recipe.eval.samples + recipe.eval.greedy))
    else:
        phases = {"update": phases["update"]}
    return TimePlan(phases, evaluations, train.steps - done, lengths, done)


def _lengths(recipe: Recipe, model: str, before: Lengths | None) -> Lengths:
    """Return the lengths of a stage's rows or chains; `before` are those of an earlier stage's transcripts."""
    if recipe.train.algorithm != "sft" and before is not None:
        return before
    tokenizer, rollout = Tokenizer.from_file(str(Path(model) / "tokenizer.json")), recipe.rollout

    def count(texts: Sequence[str]) -> float:
        return fmean(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)

    rows, data = list[Task](), recipe.data
    if data is not None and data.file is not None and is_quick(data.file):
        rows = load_tasks(data.model_copy(update={"limit": min(data.limit or _READ_ROWS, _READ_ROWS)}))
    if recipe.train.algorithm == "sft" and rows:
        prompt, sampled, results = map(count, zip(*map(_parts, rows), strict=True))
        prompt += 2 * _MARKS + _OFFER * any(task.get("tools") for task in rows)
        turns = fmean(sum(message["role"] == "assistant" for message in task["messages"]) for task in rows)
        return Lengths(prompt, turns, sampled + turns, results + _MARKS * (turns - 1), "transcripts")
    texts = [
        "".join(text_of(message.get("content") or "") for message in opening_messages(task, rollout.system_prompt))
        for task in rows
    ]
    tools = len(recipe.tools) + len(recipe.mcp_servers)
    turns_ = (1 + rollout.max_turns) / 2 if tools or rollout.agent or rollout.user else 1.0
    prompt = (count(texts) if texts else rollout.max_total_tokens / 4) + 2 * _MARKS + tools * _TOOL_TOKENS
    sampled = min(turns_ * rollout.max_tokens / 3, max(1.0, rollout.max_total_tokens - prompt))
    source = "a third of rollout.max_tokens, half of rollout.max_turns; `agentfactory doctor --sample` measures them"
    return Lengths(prompt, turns_, sampled, (turns_ - 1) * _RESULT_TOKENS, source)


def _parts(task: Task) -> list[str]:
    """Return the prompt of a transcript, what its model said, and the results, as text."""
    parts = [json.dumps(task["tools"]) if task.get("tools") else "", "", ""]
    for message in task["messages"]:
        calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
        written = [text_of(message.get("content") or ""), *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
        part = 1 if message["role"] == "assistant" else 2 if parts[1] else 0
        parts[part] += "\n".join([*written, ""])
    return parts


def size_of(folder: Path) -> Size:
    """Return the size of a model from the headers of its weights, and from its config.json the active share of
    experts."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    experts = text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts")
    share = text.get("num_experts_per_tok", experts) / experts if experts else 1.0
    body = embedding = head = 0.0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as content:
            shapes = {name: content.get_slice(name).get_shape() for name in content.keys()}  # noqa: SIM118
        for name, shape in shapes.items():
            if len(shape) < 2 or "visual" in name or "vision" in name:
                continue
            count = math.prod(shape)
            if "lm_head" in name:
                head += count
            elif "embed" in name:
                embedding += count
            else:
                body += count * (share if "experts" in name else 1.0)
    return Size(text["num_hidden_layers"], round(body), round(head or embedding), width_of(str(folder)))

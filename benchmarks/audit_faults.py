"""Does `agentfactory audit` find what is wrong with a run, and nothing in a healthy one?

Small runs of the quickstart begin at one warm start, and each has one fault: in a copy of the code (CODE), in its
recipe (RECIPES), between two attempts (RESUMED), or in the sync of its weights (the 16 of faults.py, behind a proxy).
The fault is caught if the first finding of the severity wrong or warning has its topic and its words. Healthy runs of
many recipes and seeds must have no finding of the severity wrong.

    python benchmarks/audit_faults.py [--quick] [--only NAME ...] [--output FOLDER]

The last line is JSON: `faults`, how many were `caught`, `healthy` runs, and the `false_alarms` in them.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faults
from aiohttp import web
from sabotage import Forward, Json, sabotaged
from safetensors.torch import load_file, save_file

REPOSITORY = Path(__file__).parents[1]
RECIPES_FOLDER = REPOSITORY / "recipes"
GRPO = str(RECIPES_FOLDER / "quickstart" / "grpo.yaml")
SHORT = (
    "train.steps=6",
    "train.batch_size=4",
    "rollout.group_size=8",
    "train.checkpoint_every=2",
    "train.warmup_steps=0",
)
HELD_OUT = "eval.data.limit=20"


@dataclass(frozen=True)
class Edit:
    """A piece of code that occurs exactly once in its file below agentfactory/, and what replaces it."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A fault, and what the audit must say: the topic of its first severe finding, and a pattern in its words."""

    name: str
    topic: str
    words: str
    edits: tuple[Edit, ...] = ()
    overrides: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    """Files of the user's own recipe: name, text."""
    origin: str = ""
    """Where people have met it."""


CHAINS, GROUPS = "rollout/chains", "rollout/groups"
CODE = (
    Fault(
        "results-trained",
        "tokens and masks",
        "was not sampled, but is trained",
        (Edit("rollout/token_row.py", "self.mask += [0] * len(token_ids)", "self.mask += [1] * len(token_ids)"),),
        origin="tool results in the loss (huggingface/trl #4975), or turns of the prompt (NVIDIA-NeMo/RL #2176)",
    ),
    Fault(
        "end-of-turn-masked",
        "tokens and masks",
        "was sampled, but is not trained",
        (
            Edit(
                "rollout/token_row.py",
                "self.mask += [1] * len(token_ids) if mask is None else mask",
                "self.mask += [1] * (len(token_ids) - 1) + [0]",
            ),
        ),
        origin="end-of-turn tokens without loss, so that models never stop (huggingface/trl #6357, RAGEN #59)",
    ),
    Fault(
        "message-edited",
        "tokens and masks",
        "read as another message",
        (
            Edit(
                f"{CHAINS}/policy_turns.py",
                "        self.episode.trajectory.messages.append(parsed.message)\n",
                "        parsed.message.update(content='edited')\n"
                "        self.episode.trajectory.messages.append(parsed.message)\n",
            ),
        ),
        origin="histories that a template rewrites, such as dropped reasoning (huggingface/trl #6250)",
    ),
    Fault(
        "ids-changed",
        "tokens and masks",
        "",
        (
            Edit(
                "rollout/token_row.py",
                "        self.token_ids += token_ids\n        self.mask += [0]",
                "        self.token_ids += [*token_ids[:-1], token_ids[-2]]\n        self.mask += [0]",
            ),
        ),
        origin="tokenised again after sampling (huggingface/trl #5224, modelscope/ms-swift #10012)",
    ),
    Fault(
        "other-prompt-sent",
        "weights",
        "from the first step on",
        (
            Edit(
                f"{CHAINS}/sampling.py",
                "            ids, model, parameters, sampling.cache_salt, sampling.seed, shown, encoded\n",
                "            ids[2:], model, parameters, sampling.cache_salt, sampling.seed, shown, None\n",
            ),
        ),
        origin="a beginning that only one side adds",
    ),
    Fault(
        "temperature-on-one-side",
        "weights",
        "temperature",
        (
            Edit(
                f"{CHAINS}/sampling.py",
                '"temperature": sampling.temperature,',
                '"temperature": sampling.temperature * 0.6,',
            ),
        ),
        origin="log-probabilities before the temperature (huggingface/trl #4159, prime-rl #697)",
    ),
    Fault(
        "old-weights-sent",
        "weights",
        "do not reach the server",
        (
            Edit(
                "trainers/sync/file_sync.py",
                "        _, target, content = self._written\n",
                "        _, target, content = self._written\n"
                "        file = target / 'model-00000.safetensors'\n"
                "        if version == 1:\n            self._first = load_file(file)\n"
                "        if version > 1:\n            save_file(self._first, file)\n"
                "            content = Content(self._first)\n",
            ),
            Edit(
                "trainers/sync/proven_push.py",
                "        if canary is None or scores is None:\n",
                "        if version >= 0:\n",
            ),
        ),
        origin="adapters that never arrive (verl #7495, modelscope/ms-swift #9855)",
    ),
    Fault(
        "failures-rewarded",
        "rewards",
        "chains that failed have a reward",
        (
            Edit(
                f"{CHAINS}/chain_runner.py",
                "        trajectory.error = str(error)\n",
                "        trajectory.error, trajectory.reward = str(error), 0.0\n",
            ),
        ),
        (),
        (
            (
                "hunt.py",
                "from agentfactory import ToolInfrastructureError, tool\nimport random\n"
                "from treasure_hunt import TreasureHunt\n\n\nclass Hunt(TreasureHunt):\n"
                "    def reset(self, **task):\n        super().reset(**task)\n"
                "        if random.random() < 0.1:\n            raise ToolInfrastructureError('the shop is closed')\n",
            ),
        ),
        origin="crashes that count as reward 0",
    ),
    Fault(
        "same-seed",
        "groups",
        "all chains are the same",
        (Edit(f"{GROUPS}/producer.py", "self.config.temperature, chain.id, ", "self.config.temperature, group.id, "),),
        ("rollout.equal_rewards=keep",),
        origin="equal samples in a group (modelscope/ms-swift #3450, AReaL #1524)",
    ),
    Fault(
        "advantages-turned",
        "groups",
        "has a lower advantage",
        (
            Edit(
                "trainers/loop/advantages.py",
                "_centred(rewards, known, _scaling(known, scale, batch_std))",
                "[-value for value in _centred(rewards, known, _scaling(known, scale, batch_std))]",
            ),
        ),
        origin="a sign",
    ),
    Fault(
        "advantages-of-the-batch",
        "groups",
        "not those of the group",
        (
            Edit(
                "trainers/loop/advantages.py",
                "_centred(rewards, known, _scaling(known, scale, batch_std))",
                "[value + 0.3 for value in _centred(rewards, known, _scaling(known, scale, batch_std))]",
            ),
        ),
        origin="baselines over other chains than the group's (dllm-reasoning/d1 #19)",
    ),
    Fault(
        "reward-of-another-chain",
        "chains played again",
        "another reward",
        (
            Edit(
                f"{CHAINS}/chain_runner.py",
                "            trajectory.metrics = dict(verdict.metrics)\n",
                "            trajectory.metrics = dict(verdict.metrics)\n"
                "            trajectory.reward = float(len(trajectory.id) % 2 + int(trajectory.id[-1]) % 3)\n",
            ),
        ),
        origin="rewards that a shuffle attached to other chains",
    ),
    Fault(
        "results-lost",
        "chains played again",
        "do something else",
        (
            Edit(
                f"{CHAINS}/tool_loop.py",
                "                ending = episode.note_results(parsed.calls, results)\n",
                "                ending = episode.note_results(parsed.calls, results)\n"
                "                for result in results:\n"
                "                    object.__setattr__(result, 'content', 'ok')\n",
            ),
        ),
        origin="results that the model never reads (PrimeIntellect-ai/verifiers #1559)",
    ),
    Fault(
        "order-stuck",
        "tasks",
        "another task than",
        (
            Edit(
                "rollout/data/order_and_mix.py",
                "        return self._order[index]",
                "        return self._order[index % 3]",
            ),
        ),
        origin="a sampler that begins again each step",
    ),
    Fault(
        "metrics-of-others",
        "metrics",
        "report another reward",
        (
            Edit(
                "trainers/metrics.py",
                '"reward": fmean(rewards) if rewards else 0.0',
                '"reward": max(rewards) if rewards else 0.0',
            ),
        ),
        origin="curves over the best chains only",
    ),
    Fault(
        "optimizer-asleep",
        "weights",
        "have not changed",
        (Edit("trainers/update/learner.py", "        self.optimizer.step()\n", "        pass\n"),),
        origin="frozen parameters, or an update that is never made",
    ),
    Fault(
        "too-old-trained",
        "the end of the run",
        "versions old",
        (
            Edit(
                f"{GROUPS}/staleness.py",
                "min(self.total, (self.max_staleness + 1 + self.version) * self.batch_size)",
                "min(self.total, (self.max_staleness + 4 + self.version) * self.batch_size)",
            ),
            Edit(
                f"{GROUPS}/staleness.py",
                "        return max(0, self.max_staleness - self._age(self._begun(group)))",
                "        return 9",
            ),
        ),
        ("train.steps=8", "rollout.max_staleness=1"),
        origin="queues that run ahead of their bound",
    ),
)
BROKEN_TOOL = (
    "from agentfactory import tool\nfrom treasure_hunt import TreasureHunt\n\n\nclass Hunt(TreasureHunt):\n    @tool\n"
    '    def move(self, direction: str) -> str:\n        "Take one step."\n'
    "        raise RuntimeError('no such file')\n"
)
RECIPES = (
    Fault(
        "held-out-trained",
        "tasks",
        "also training tasks",
        overrides=("eval.data.path=DATA/train.jsonl",),
        origin="evaluation sets within the training set",
    ),
    Fault(
        "no-call-read",
        "tool calls",
        "called a tool",
        overrides=(
            "rollout.max_total_tokens=1024",
            "server.max_model_len=1024",
            "rollout.parser=react",
            "rollout.equal_rewards=keep",
            "train.steps=4",
            "rollout.group_size=16",
        ),
        origin="a parser for another model: chains end without a call",
    ),
    Fault(
        "tool-broken",
        "tool calls",
        "failed",
        overrides=("rollout.equal_rewards=keep",),
        files=(("hunt.py", BROKEN_TOOL),),
        origin="a tool that raises in every call",
    ),
    Fault(
        "turns-cut",
        "chains lost",
        "max_tokens|max_turns|context_overflow",
        overrides=("rollout.max_total_tokens=100", "rollout.equal_rewards=keep"),
        origin="limits that most chains reach",
    ),
)
RESUMED = (
    Fault(
        "places-skipped",
        "tasks",
        "were passed over",
        (
            Edit(
                f"{GROUPS}/producer.py",
                "        self._begun = resumed.done |",
                "        self._next_position += 100\n        self._begun = resumed.done |",
            ),
        ),
        origin="prompts skipped on resume (KempnerForge #51)",
    ),
    Fault(
        "places-repeated",
        "tasks|the end of the run",
        "twice|already delivered",
        (
            Edit(
                f"{GROUPS}/producer.py",
                "        self._begun = resumed.done | set(resumed.again)",
                "        self._begun = frozenset() and resumed.done | set(resumed.again)",
            ),
        ),
        origin="prompts repeated on resume (huggingface/accelerate #4071)",
    ),
    Fault(
        "data-changed",
        "tasks",
        "another task than",
        overrides=("seed=0",),
        files=(("reorder", ""),),
        origin="a file of data that was written again between two attempts",
    ),
)
REPLAYED = "chains played again"
SYNC_WORDS = "stopped after step"
"""What the audit says of a sync that a proof has stopped."""


def run(*arguments: str, code: Path = REPOSITORY, log: Path) -> int:
    """Run a command of the code in a folder; return its exit status."""
    environment = os.environ | {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    with log.open("a") as output:
        command = [sys.executable, "-m", "agentfactory", *arguments]
        return subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode


def audited(folder: Path) -> list[dict[str, Any]]:
    """Return the reports of the run in a folder."""
    command = [sys.executable, "-m", "agentfactory", "audit", str(folder), "--json"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if found.returncode not in (0, 1, 6):
        text = found.stderr.splitlines()[-1] if found.stderr else f"status {found.returncode}"
        return [{"findings": [{"severity": "wrong", "topic": "no audit", "text": text, "fix": "", "evidence": []}]}]
    return [json.loads(line) for line in found.stdout.splitlines()]


def severe(reports: Sequence[dict[str, Any]], *levels: str) -> list[dict[str, Any]]:
    return [finding for report in reports for finding in report["findings"] if finding["severity"] in levels]


@contextmanager
def copied(folder: Path, edits: Sequence[Edit]) -> Iterator[Path]:
    """Yield a copy of the code with edits; without any, the code itself."""
    if not edits:
        yield REPOSITORY
        return
    copy = folder / "code"
    shutil.copytree(REPOSITORY / "agentfactory", copy / "agentfactory", symlinks=True)
    for edit in edits:
        file = copy / "agentfactory" / edit.file
        file.write_text(file.read_text(encoding="utf-8").replace(edit.old, edit.new), encoding="utf-8")
    yield copy
    shutil.rmtree(copy)


def check_edits() -> None:
    """Raise ValueError if the code of an edit does not occur exactly once."""
    for fault in (*CODE, *RECIPES, *RESUMED):
        for edit in fault.edits:
            count = (REPOSITORY / "agentfactory" / edit.file).read_text(encoding="utf-8").count(edit.old)
            if count != 1:
                raise ValueError(f"{fault.name}: {edit.old!r} occurs {count} times in {edit.file}, not once")


class Bench:
    """Runs in a folder, from one warm start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.warm = folder / "warm" / "checkpoints" / "step-000150"
        if not self.warm.exists():
            sft = str(RECIPES_FOLDER / "quickstart" / "sft.yaml")
            run("train", sft, "train.steps=150", f"output={folder / 'warm'}", "--overwrite", log=self.log)
        self.data = folder / "warm" / "prepared"

    def recipe(self, fault: Fault, folder: Path) -> str:
        """Return the recipe of a fault; one with files of its own is a folder of its own."""
        if not any(name.endswith(".py") for name, _ in fault.files):
            return GRPO
        own = folder / "recipe"
        shutil.copytree(RECIPES_FOLDER / "quickstart", own)
        for name, text in fault.files:
            (own / name).write_text(text, encoding="utf-8")
        grpo = own / "grpo.yaml"
        grpo.write_text(grpo.read_text().replace("treasure_hunt.py:TreasureHunt", "hunt.py:Hunt"), encoding="utf-8")
        return str(grpo)

    def train(
        self,
        recipe: str,
        output: Path,
        code: Path,
        *overrides: str,
        resume: bool = False,
        data: Path | None = None,
    ) -> int:
        data = data or self.data
        # prepare would make the same files for each run
        files = ("prepare=null", f"data.path={data}/train.jsonl", f"eval.data.path={data}/heldout.jsonl")
        settings = [*files, f"model.path={self.warm}", HELD_OUT, *SHORT, *overrides, f"output={output}"]
        return run("train", recipe, *settings, "--resume" if resume else "--overwrite", code=code, log=self.log)

    def faulty(self, fault: Fault) -> tuple[bool, str]:
        """Return whether the audit finds a fault of the code or the recipe, and what it says."""
        folder = self.folder / fault.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with copied(folder, fault.edits) as code:
            overrides = [each.replace("DATA", str(self.data)) for each in fault.overrides]
            status = self.train(self.recipe(fault, folder), folder / "run", code, *overrides)
        return judged(fault, audited(folder / "run"), status)

    def resumed(self, fault: Fault) -> tuple[bool, str]:
        """Return whether the audit finds a fault of the second attempt of a run."""
        folder = self.folder / fault.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copytree(self.data, data := folder / "data")
        first, longer = (("train.checkpoint_every=1", f"train.steps={steps}") for steps in (3, 8))
        self.train(GRPO, folder / "run", REPOSITORY, *fault.overrides, *first, data=data)
        if fault.files:
            tasks = data / "train.jsonl"
            tasks.write_text("".join(reversed(tasks.read_text().splitlines(keepends=True))))
        with copied(folder, fault.edits) as code:
            status = self.train(GRPO, folder / "run", code, *fault.overrides, *longer, resume=True, data=data)
        return judged(fault, audited(folder / "run"), status)

    def unsynced(self, kind: type[faults.Fault]) -> tuple[bool, str]:
        """Return whether the audit says which sync a proof has stopped, with a fault between trainer and server."""
        folder = self.folder / kind.__name__
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(self.warm / "model.safetensors", folder / "base.safetensors")
        lora = ("model.lora.rank=8", "train.learning_rate=2e-3") if kind.adapters else ("train.learning_rate=2e-4",)
        data = (f"data.path={self.data}/train.jsonl", "eval.data=null")
        settings = ("prepare=null", f"model.path={self.warm}", *data, *lora)
        with ExitStack() as stack:
            url = stack.enter_context(served(settings, folder))
            proxy = stack.enter_context(sabotaged(url, Breaking(kind(url, folder)).tamper))
            overrides = (*lora, "train.steps=8", f"server.url={proxy}")
            status = self.train(GRPO, folder / "run", REPOSITORY, *overrides)
        stopped = Fault(kind.__name__, "the end of the run", SYNC_WORDS)
        return judged(stopped, audited(folder / "run"), status)


class Breaking:
    """A fault that begins with the BROKEN-th version that a run pushes."""

    def __init__(self, fault: faults.Fault) -> None:
        self.fault = fault
        self.pushed, self.acted = 0, False
        self.prefix, self.folder = "", fault.folder

    async def tamper(self, path: str, body: Json, forward: Forward) -> web.Response:
        """See sabotage.Tamper."""
        if path == faults.GENERATE and self.pushed == faults.BROKEN and not self.acted and is_of_chain(body):
            # after the proof of one version, and before the next one
            self.acted = True
            await asyncio.to_thread(self.fault.between, self)  # type: ignore[arg-type]
        if path in ("/start_weight_update", "/v1/load_lora_adapter"):
            if path == "/v1/load_lora_adapter":
                self.prefix = re.sub(r"\d+$", "", body["lora_name"])
            self.fault.broken = self.pushed >= faults.BROKEN
            self.pushed += 1
        return await self.fault.tamper(path, body, forward)

    def other_weights(self) -> Path:
        """Write full weights of another run."""
        state, file = load_file(self.folder / "base.safetensors"), self.folder / "others.safetensors"
        save_file({name: value * 1.02 for name, value in state.items()}, file, metadata={"format": "pt"})
        return file

    def other_adapter(self) -> Path:
        """Write an adapter of another run: the last one, changed."""
        last = self.fault.paths[-1]
        others = self.folder / "others"
        folders = sorted((self.folder / "run" / "sync").glob("*"))
        shutil.copytree(folders[-1], others)
        state = load_file(last)
        save_file({name: value + 0.02 for name, value in state.items()}, others / "adapter_model.safetensors")
        return others


def is_of_chain(body: Json) -> bool:
    """Return whether a request samples a turn; those of the canary sample a single token."""
    return bool(body.get("sampling_params", {}).get("max_tokens", 0) > 1)


@contextmanager
def served(settings: Sequence[str], folder: Path) -> Iterator[str]:
    """Yield the address of a server for a recipe."""
    log = folder / "server.log"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        command = [sys.executable, "-m", "agentfactory", "serve", GRPO, *settings, "server.port=0"]
        process = subprocess.Popen(
            [*command, f"output={folder / 'served'}"], env=environment, stdout=output, stderr=output
        )
    try:
        until = time.monotonic() + 120
        while (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server has not started; see {log}")
            time.sleep(0.2)
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def judged(fault: Fault, reports: Sequence[dict[str, Any]], status: int) -> tuple[bool, str]:
    """Return whether the first severe finding is the fault's, and its words."""
    found = severe(reports, "wrong", "warning")
    if not found:
        return False, f"nothing (the run ended with status {status})"
    first = found[0]
    words = " ".join([first["text"], first["fix"], *(evidence["text"] for evidence in first["evidence"])])
    right = re.fullmatch(fault.topic, first["topic"]) is not None and re.search(fault.words, words) is not None
    return right, f"{first['severity']}: {first['topic']}: {first['text']}"


HEALTHY: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    *((f"hunt-{seed}", "quickstart/grpo.yaml", (f"seed={seed}", "train.steps=12")) for seed in range(6)),
    ("hunt-lora", "quickstart/grpo.yaml", ("model.lora.rank=8", "train.learning_rate=2e-3")),
    ("hunt-ahead", "quickstart/grpo.yaml", ("rollout.max_staleness=2", "train.steps=12")),
    ("hunt-baseline", "quickstart/grpo.yaml", ("rollout.max_staleness=2", "rollout.late_chains=baseline")),
    ("hunt-keep", "quickstart/grpo.yaml", ("rollout.max_staleness=1", "rollout.inflight=keep")),
    ("hunt-ppo", "quickstart/ppo.yaml", ()),
    ("hunt-rloo", "quickstart/grpo.yaml", ("train.algorithm=rloo",)),
    ("hunt-gigpo", "quickstart/grpo.yaml", ("train.algorithm=gigpo",)),
    ("hunt-reinforce", "quickstart/grpo.yaml", ("train.algorithm=reinforce_pp",)),
    ("hunt-bfloat16", "quickstart/grpo.yaml", ("model.dtype=bfloat16",)),
    ("hunt-short", "quickstart/grpo.yaml", ("rollout.max_turns=4", "rollout.equal_rewards=keep")),
    ("code", "code_interpreter/code_interpreter.yaml", ("sft.train.steps=100", "grpo.train.steps=4")),
    ("two-hop", "two_hop/two_hop.yaml", ("sft.train.steps=100", "grpo.train.steps=4")),
    ("lake", "gymnasium/small.yaml", ("sft.train.steps=100", "grpo.train.steps=4")),
    ("words", "reasoning_gym/small.yaml", ("sft.train.steps=100", "grpo.train.steps=4")),
    ("tic-tac-toe", "textarena/small.yaml", ("sft.train.steps=100", "grpo.train.steps=4")),
    ("shop", "webshop/small.yaml", ("sft.train.steps=100", "grpo.train.steps=4")),
    ("animals", "scienceworld/small.yaml", ("sft.train.steps=100", "grpo.train.steps=4")),
    ("three-tasks", "three_tasks/three_tasks.yaml", ("sft.train.steps=100", "grpo.train.steps=4")),
)


def healthy(bench: Bench, name: str, recipe: str, overrides: Sequence[str]) -> tuple[bool, str]:
    """Return whether the audit of a run without a fault finds nothing wrong, and what it finds."""
    folder = bench.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    path = RECIPES_FOLDER / recipe
    if recipe.startswith("quickstart/"):
        status = bench.train(str(path), folder, REPOSITORY, *overrides)
    else:
        status = run("train", str(path), *overrides, f"output={folder}", log=bench.log)
    reports = audited(folder)
    wrong, warnings = severe(reports, "wrong"), severe(reports, "warning")
    told = "; ".join(f"{one['severity']}: {one['topic']}: {one['text']}" for one in [*wrong, *warnings])
    played = [report["looked_at"][REPLAYED] for report in reports if REPLAYED in report["looked_at"]]
    return status == 0 and not wrong, f"{told or f'nothing (status {status})'}; played again: {' and '.join(played)}"


def main() -> None:
    """Make the runs, audit them, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three faults and two healthy runs")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these runs alone")
    parser.add_argument("--output", type=Path, help="folder for the runs; default: a temporary one")
    args = parser.parse_args()
    check_edits()
    with ExitStack() as stack:
        folder = args.output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder)
        jobs = [
            *((fault.name, lambda fault=fault: bench.faulty(fault)) for fault in (*CODE, *RECIPES)),
            *((fault.name, lambda fault=fault: bench.resumed(fault)) for fault in RESUMED),
            *((kind.__name__, lambda kind=kind: bench.unsynced(kind)) for kind in faults.FAULTS),
        ]
        fine = [(name, lambda each=(name, recipe, more): healthy(bench, *each)) for name, recipe, more in HEALTHY]
        if args.quick:
            jobs, fine = jobs[:3], fine[:2]
        if args.only:
            jobs, fine = ([job for job in some if job[0] in args.only] for some in (jobs, fine))
        caught, alarms = 0, 0
        for name, job in jobs:
            found, told = job()
            caught += found
            print(f"{name:26} {'found ' if found else 'MISSED'}  {told[:150]}", flush=True)
        for name, job in fine:
            right, told = job()
            alarms += not right
            print(f"{name:26} {'fine  ' if right else 'ALARM '}  {told[:150]}", flush=True)
    print(json.dumps({"faults": len(jobs), "caught": caught, "healthy": len(fine), "false_alarms": alarms}))


if __name__ == "__main__":
    main()

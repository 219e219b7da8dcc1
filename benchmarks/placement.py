"""Trainer and server on one device: split compared with time_share, and the speed and memory of each.

The model is a random Qwen2. On a GPU it has the shape of Qwen2.5-0.5B (`--size 1.5b`: of Qwen2.5-1.5B) in bfloat16. On
a CPU it is a tiny one in float32, which tests the code but does not predict a GPU's results.

- steps: `agentfactory train` on one-turn chains of random text, groups of 8, with full weights and with an adapter,
  under each placement; the seconds of a step are the mean without the first step.
- update: `Learner.update` alone on packed rows: tokens per second, MFU (TRL's formula with its causal correction, and
  the head for trained tokens only; an adapter's update computes two thirds of that), and peak memory from torch's
  allocator.
- decode: the embedded engine alone, with all slots busy: tokens per second with and without fixed shapes (CUDA graphs
  on a GPU), and peak memory.

The last line is JSON; earlier lines of JSON are what was known then. `time_share_vs_split_step` is the seconds of a
step with time_share divided by those with split (lower is better; `_lora`: with an adapter). `moving_share` is the
share of sleeping, moving in, offloading and waking in a step with time_share. `graphs_vs_eager_decode` is the tokens
per second with CUDA graphs divided by those without. `mfu_update` and `mfu_update_lora` are shares of the GPU's peak.
The last three appear only on a GPU.

    python benchmarks/placement.py [--quick] [--size 0.5b|1.5b]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from agentfactory.base.user_code.loading import load_object

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart"
GROUP = 8
REWARD = '''"""Anything that tells chains apart."""

import zlib

from agentfactory import reward


@reward
def checksum(prediction: str) -> float:
    return zlib.crc32(prediction.encode()) % 100 / 100
'''


@dataclass(frozen=True)
class Size:
    """A model's shape and its work: tokens of prompts and answers, groups, and concurrent sequences."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    prompt: int
    answer: int
    groups: int
    sequences: int
    kv_heads: int = 2

    @property
    def length(self) -> int:
        return self.prompt + self.answer


SIZES = {
    "tiny": Size(256, 4, 4, 768, 4096, prompt=64, answer=48, groups=2, sequences=16),
    "0.5b": Size(896, 24, 14, 4864, 151_936, prompt=512, answer=256, groups=16, sequences=128),
    "1.5b": Size(1536, 28, 12, 8960, 151_936, prompt=512, answer=256, groups=16, sequences=128),
}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype() -> str:
    return "bfloat16" if device() == "cuda" else "float32"


def make_model(size: Size, folder: Path) -> None:
    """Write a model with random weights, and the quickstart's tokenizer extended to the model's vocabulary with words
    that do not occur in texts."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    load_object("prepare.py:prepare", QUICKSTART)(folder, 0)
    model = folder / "model"
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    end = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == "<|im_end|>")
    words |= {f"{number}": number for number in range(len(words), size.vocabulary)}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,
        dtype=dtype(),
    )
    with torch.device(device()):
        network = Qwen2ForCausalLM(config)
    network.to(getattr(torch, dtype())).save_pretrained(model)


# ---- steps


def write_recipe(size: Size, folder: Path, steps: int) -> Path:
    """Write a recipe with one-turn chains on random words, and return its path."""
    draw = random.Random(0)
    words = [f"{draw.randrange(10)}" for _ in range(size.prompt - 24)]
    tasks = [{"question": "".join(draw.sample(words, len(words)))} for _ in range(64)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    recipe = {
        "model": {"path": str(folder / "model"), "dtype": dtype()},
        "data": {"path": str(folder / "tasks.jsonl")},
        "rewards": [str(folder / "reward.py:checksum")],
        "rollout": {
            "group_size": GROUP,
            "max_turns": 1,
            "max_tokens": size.answer,
            "max_total_tokens": 2 * size.length,
            "concurrency": size.groups * GROUP,
        },
        "server": {"engine": "embedded", "max_model_len": 2 * size.length, "max_num_seqs": size.sequences},
        "train": {
            "steps": steps,
            "batch_size": size.groups,
            "token_budget": 16 * size.length,
            "learning_rate": 1e-6,
            "gradient_checkpointing": True,
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def run_steps(recipe: Path, mode: str, lora: bool, folder: Path) -> dict[str, float]:
    """Return the mean seconds of the steps after the first, by activity."""
    output = folder / f"{mode}-{'lora' if lora else 'full'}"
    command = [sys.executable, "-m", "agentfactory", "train", str(recipe), f"output={output}"]
    command += [f"placement.mode={mode}", *(["model.lora.rank=16"] if lora else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{mode} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    logged = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [entry for entry in logged if "loss" in entry][1:]

    def mean(*names: str) -> float:
        return statistics.fmean(sum(step.get(f"seconds/{name}", 0.0) for name in names) for step in steps)

    found = {name: mean(name) for name in ("step", "wait", "update", "sync")}
    found["moving"] = mean("sleep", "bring_in", "park", "wake")
    # a sleeping server is woken during the sync
    found["sync"] -= mean("wake")
    print(
        f"  {mode:10} {'adapter' if lora else 'full':8} {found['step']:7.3f} s a step: rollout {found['wait']:.3f}, "
        f"update {found['update']:.3f}, sync {found['sync']:.3f}, moving {found['moving']:.3f}",
        flush=True,
    )
    return found


# ---- update and decode, each in its own process


def make_update(size: Size, folder: Path, lora: bool, **settings: Any) -> Callable[[], list[float]]:
    """Return a function that makes one `Learner.update` and returns its gradient norms. The rows of a group share their
    prompt, which saves work with trees alone. `settings` are of `train`."""
    from accelerate import Accelerator

    from agentfactory.trainers.batches.batch import TrainingRow
    from agentfactory.trainers.config import TrainRecipe
    from agentfactory.trainers.update.learner import Learner
    from agentfactory.trainers.update.policy_update import update_policy

    model = {"path": str(folder / "model"), "dtype": dtype(), "lora": {"rank": 16} if lora else None}
    budget = 16 * size.length
    train = {"steps": 1, "learning_rate": 1e-6, "batching": "packed", "token_budget": budget, **settings}
    recipe = TrainRecipe.model_validate({"model": model, "train": {"gradient_checkpointing": True, **train}})
    learner = Learner(recipe, Accelerator())
    draw = random.Random(0)
    rows = []
    for _ in range(size.groups):
        prompt = draw.choices(range(size.vocabulary), k=size.prompt)
        for _ in range(GROUP):
            targets = list(range(size.prompt, size.length))
            streams = {name: [1.0] * len(targets) for name in ("behaviour", "weight")}
            streams |= {"advantage": [draw.gauss(0, 1)] * len(targets), "mixed": [0.0] * len(targets)}
            ids = prompt + draw.choices(range(size.vocabulary), k=size.answer)
            rows.append(TrainingRow(ids, targets, streams))

    def update() -> list[float]:
        made = update_policy(learner, learner.deal(rows), recipe).updates
        wait_for_device()
        return [each.grad_norm for each in made]

    return update


def measure_update(size: Size, folder: Path, lora: bool, **settings: Any) -> dict[str, float]:
    """Return the tokens, seconds and tokens per second of `Learner.update`, and its peak memory. `settings` are of
    `train`."""
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return time_update(make_update(size, folder, lora, **settings), size, folder)


def time_update(update: Callable[[], list[float]], size: Size, folder: Path) -> dict[str, float]:
    """Time a function from `make_update`; see `measure_update`."""
    from transformers import AutoConfig
    from trl.trainer.utils import adjusted_mfu, compute_flops_per_token, compute_mfu, get_peak_flops

    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - started)
    # the first update is a warm-up
    tokens, fastest = size.length * size.groups * GROUP, min(seconds[1:])
    rate = tokens / fastest
    found = {"tokens": tokens, "seconds": fastest, "tokens_per_second": rate, "peak_gib": peak_gib()}
    name = torch.cuda.get_device_name() if device() == "cuda" else ""
    if flops := get_peak_flops(name, dtype()):
        config = AutoConfig.from_pretrained(folder / "model")
        mfu = compute_mfu(compute_flops_per_token(config, size.length), rate, 1, flops)
        # that counts the head for all tokens, forward and backward
        prompts = 6 * size.hidden * size.vocabulary * rate * size.prompt / size.length
        found["mfu"] = adjusted_mfu(mfu, config, size.length) / 100 - prompts / flops
    return found


def measure_decode(size: Size, folder: Path, static: bool) -> dict[str, float]:
    """Return the tokens per second of the embedded engine with all its slots busy, and its peak memory."""
    from transformers import AutoModelForCausalLM

    from agentfactory.rollout.inference.embedded.engine import Engine
    from agentfactory.rollout.inference.embedded.sampling import Request

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, dtype()))
    length = 2 * size.length
    engine = Engine(model.to(device()), max_model_len=length, max_num_seqs=size.sequences, static_decode=static)
    rates = []
    for _ in range(2):
        for _ in range(size.sequences):
            engine.add(Request(torch.randint(0, size.vocabulary, (size.prompt,)).numpy(), size.answer, lambda r: None))
        while any(not request.tokens for request in engine.requests()):
            engine.step()  # prompts
        made = sum(len(request.tokens) for request in engine.requests())
        wait_for_device()
        started = time.perf_counter()
        while engine.busy:
            engine.step()
        rates.append((size.sequences * size.answer - made) / (time.perf_counter() - started))
        engine.reset_prefix_cache()
    # the first round is a warm-up, and captures graphs
    return {"tokens_per_second": rates[-1], "peak_gib": peak_gib()}


def wait_for_device() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device() == "cuda" else float("nan")


PARTS = {"update": measure_update, "decode": measure_decode}


def measure(part: str, size: Size, folder: Path, flag: bool, label: str) -> dict[str, float]:
    """Run a part in its own process, and return its result."""
    command = [sys.executable, __file__, "--part", part, json.dumps(asdict(size)), str(folder), str(int(flag))]
    done = subprocess.run(command, capture_output=True, text=True, env={"OMP_WAIT_POLICY": "passive", **os.environ})
    if done.returncode != 0:
        raise SystemExit(f"{part} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    mfu = f", MFU {found['mfu']:.1%}" if "mfu" in found else ""
    peak = f", peak {found['peak_gib']:.2f} GiB" if device() == "cuda" else ""
    print(f"  {label:28} {found['tokens_per_second']:9.0f} tokens/s{mfu}{peak}", flush=True)
    return found


def compare(name: str, quick: bool) -> None:
    """Run all measurements, and print the ratios."""
    size, ratios = SIZES[name], {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(size, folder)
        print(f"{name}, {dtype()}, {torch.cuda.get_device_name() if device() == 'cuda' else 'CPU'}:", flush=True)
        updates = {lora: measure("update", size, folder, lora, f"update, {_kind(lora)}") for lora in (False, True)}
        decodes = {
            static: measure("decode", size, folder, static, f"decode, {'fixed' if static else 'free'} shapes")
            for static in (False, True)
        }
        if device() == "cuda":
            rates = [decodes[static]["tokens_per_second"] for static in (True, False)]
            ratios["graphs_vs_eager_decode"] = rates[0] / rates[1]
            for lora, key in ((False, "mfu_update"), (True, "mfu_update_lora")):
                if "mfu" in updates[lora]:
                    ratios[key] = updates[lora]["mfu"]
            show(ratios)
        recipe = write_recipe(size, folder, steps=4 if quick else 8)
        for lora in (False, True):
            split, turns = (run_steps(recipe, mode, lora, folder) for mode in ("split", "time_share"))
            suffix = "_lora" if lora else ""
            ratios[f"time_share_vs_split_step{suffix}"] = turns["step"] / split["step"]
            ratios[f"moving_share{suffix}"] = turns["moving"] / turns["step"]
            show(ratios)


def show(ratios: dict[str, float]) -> None:
    """Print what is known so far."""
    print(json.dumps({key: round(ratio, 3) for key, ratio in ratios.items()}), flush=True)


def _kind(lora: bool) -> str:
    return "adapter" if lora else "full weights"


def main() -> None:
    """Run the comparison, or one part of it in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 steps of each placement in place of 8")
    parser.add_argument("--size", choices=["0.5b", "1.5b"], default="0.5b", help="on a GPU; on a CPU it is tiny")
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part, size, folder, flag = options.part
        print(json.dumps(PARTS[part](Size(**json.loads(size)), Path(folder), flag == "1")))
        return
    compare(options.size if device() == "cuda" else "tiny", options.quick)


if __name__ == "__main__":
    main()

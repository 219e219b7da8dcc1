"""One GRPO update: ours compared with TRL 1.16's GRPOTrainer, and the savings from merging rows into trees.

The model is a generated Qwen3 (hidden 256, 4 layers, float32). Each side runs in its own process with one thread per
available core, on the same rows, advantages and old log-probabilities; the loss and gradient norm of the first update
must agree. CPU seconds are those of the process, all threads, for one later update with its optimiser step (the minimum
if there are several). Peak memory is the peak of the process since before the first update, minus its memory at that
time. Neither side uses gradient checkpointing; a micro-batch of ours may contain as many tokens as one of TRL's.

The workload is that of an agent with tools: groups of 8 chains on one prompt (384 to 640 tokens: instructions, tool
descriptions, question); a chain has 1 to 6 turns of 24 to 96 sampled tokens with 32 to 160 tokens of tool results
between them.

- ours: `Learner.update` on `make_batches(..., "tree")` with the clipped loss of agentfactory.trainers.update.losses.
- TRL: `GRPOTrainer.train` with its loop, accumulation, loss (dapo, which divides as we do) and optimiser; only the
  generation is replaced by given tokens. Micro-batches have 8 chains, padded as TRL does: all as wide as the batch's
  longest prompt and completion. On a CPU its head scores every position; on a GPU, where Triton compacts them, it would
  score only the completions.

The last line is JSON:

- `cpu_vs_trl`: TRL's CPU seconds divided by ours, with a vocabulary of 2,048 (higher is better).
- `peak_memory_vs_trl`: our peak divided by TRL's, with a vocabulary of 151,936 and a single group (lower is better);
  `peak_memory_vs_trl_small`: the same with 2,048.
- `tree_speedup`: the CPU seconds of padded rows divided by the tree's, for groups of 8 with a prompt of 512 and
  completions of 64.
- `merged_turns_speedup`: the same for chains of 8 turns that were stored as one row per turn (a prompt of 256, each
  turn 48 sampled tokens and a result of 48); each row has the whole history and that turn.
- `images_speedup`: the same for groups of 8 chains with images, on a generated Qwen3-VL (a frozen tower of 4 blocks): a
  prompt of 304 tokens with an image of 448 x 448 (196 tokens), 48 sampled tokens, each chain's own crop of 128 x 128
  (16 tokens) and 48 sampled tokens.

Padded rows are those of `make_batches(..., "padded")`, which groups rows of similar length.

    taskset -c 0,1 python benchmarks/update.py [--quick]
"""

import argparse
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SMALL, LARGE = 2048, 151_936
"""Vocabulary sizes."""
GROUP = 8
PATCH = 16
"""Side of a patch in pixels; a token of an image has 2 x 2 patches."""


def make_model(folder: Path, vocabulary: int) -> None:
    """Save a randomly initialised Qwen3, and a tokenizer, which TRL requires."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=768,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"end": 0, "pad": 1}, unk_token="pad"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="end", pad_token="pad").save_pretrained(folder)


def make_seeing_model(folder: Path, vocabulary: int) -> None:
    """Save a randomly initialised Qwen3-VL with its image processor."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    make_model(folder, vocabulary)
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    text |= {"head_dim": 32, "intermediate_size": 768, "vocab_size": vocabulary, "rope_parameters": rope}
    text |= {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    tower = {"hidden_size": 128, "intermediate_size": 512, "num_heads": 4, "depth": 4, "out_hidden_size": 256}
    tower |= {"patch_size": PATCH, "num_position_embeddings": 1024, "deepstack_visual_indexes": [1, 2]}
    image, video, start, end = range(vocabulary - 4, vocabulary)
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 4096, "longest_edge": 1 << 24},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")


# ---- workloads: rows of {ids, prompt (its length), targets, advantage, proximal (old log-probabilities)}


def _row(draw: random.Random, vocabulary: int, ids: list[int], prompt: int, targets: list[int]) -> dict[str, Any]:
    # an untrained model gives all tokens about the same probability; some ratios are clipped
    proximal = [-math.log(vocabulary) + draw.gauss(0, 0.3) for _ in targets]
    return {"ids": ids, "prompt": prompt, "targets": targets, "advantage": draw.gauss(0, 1), "proximal": proximal}


def agent_chains(groups: int, vocabulary: int) -> list[dict[str, Any]]:
    """Return the workload of the comparison with TRL."""
    draw = random.Random(0)
    rows = []
    for _ in range(groups):
        prompt = _tokens(draw, vocabulary, draw.randint(384, 640))
        for _ in range(GROUP):
            ids, targets = list(prompt), list[int]()
            for turn in range(draw.randint(1, 6)):
                ids += _tokens(draw, vocabulary, draw.randint(32, 160)) if turn else []
                sampled = draw.randint(24, 96)
                targets += range(len(ids), len(ids) + sampled)
                ids += _tokens(draw, vocabulary, sampled)
            rows.append(_row(draw, vocabulary, ids, len(prompt), targets))
    return rows


def shared_prompts(groups: int, vocabulary: int) -> list[dict[str, Any]]:
    """Return groups of single-turn answers."""
    draw = random.Random(1)
    rows = []
    for _ in range(groups):
        prompt = _tokens(draw, vocabulary, 512)
        rows += [
            _row(draw, vocabulary, prompt + _tokens(draw, vocabulary, 64), 512, list(range(512, 576)))
            for _ in range(GROUP)
        ]
    return rows


def rows_per_turn(chains: int, vocabulary: int) -> list[dict[str, Any]]:
    """Return chains of 8 turns, with one row per turn."""
    draw = random.Random(2)
    rows = []
    for _ in range(chains):
        ids = _tokens(draw, vocabulary, 256)
        for _ in range(8):
            start = len(ids)
            ids = ids + _tokens(draw, vocabulary, 48)
            rows.append(_row(draw, vocabulary, ids, 256, list(range(start, len(ids)))))
            ids = ids + _tokens(draw, vocabulary, 48)
    return rows


def seeing_chains(groups: int, vocabulary: int) -> list[dict[str, Any]]:
    """Return groups of chains with an image in the prompt, and another one in the middle of each chain. Images are
    given as (place, seed, side in pixels)."""
    draw = random.Random(3)
    rows = []
    for group in range(groups):
        picture, crop = ([vocabulary - 4] * (side // PATCH // 2) ** 2 for side in (448, 128))
        # the last four ids are placeholders for images and videos
        prompt = [*_tokens(draw, vocabulary - 4, 152), *picture, *_tokens(draw, vocabulary - 4, 152)]
        for chain in range(GROUP):
            ids = prompt + _tokens(draw, vocabulary - 4, 48) + crop + _tokens(draw, vocabulary - 4, 48)
            first, second = len(prompt), len(ids) - 48
            row = _row(draw, vocabulary, ids, first, [*range(first, first + 48), *range(second, second + 48)])
            images = [(152, group, 448), (first + 48, 1000 + group * GROUP + chain, 128)]
            rows.append({**row, "images": images})
    return rows


def stored_images(folder: Path, images: list[tuple[int, int, int]]) -> tuple[Any, ...]:
    """Make a row's images of noise, store them, and return their positions in the row."""
    from PIL import Image

    from agentfactory.rollout.images.store import ImageStore
    from agentfactory.rollout.token_row import ImageSpan

    spans, store = [], ImageStore(folder)
    for place, seed, side in images:
        image = Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side))
        patches = side // PATCH
        spans.append(ImageSpan(place, patches**2 // 4, store.put(image), (1, patches, patches)))
    return tuple(spans)


def _tokens(draw: random.Random, vocabulary: int, count: int) -> list[int]:
    # 0 and 1 are the end and padding tokens
    return [draw.randrange(2, vocabulary) for _ in range(count)]


def trl_width(rows: list[dict[str, Any]]) -> int:
    """Return the length to which TRL pads every row."""
    return max(row["prompt"] for row in rows) + max(len(row["ids"]) - row["prompt"] for row in rows)


# ---- the two sides; each returns loss and gradient norm of the first update, CPU seconds per update, and peak in MiB


class Meter:
    """A meter of this process's CPU seconds and peak memory."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._baseline = self._status("VmRSS")
        self._started = 0.0
        self.seconds: list[float] = []

    def start(self) -> None:
        """Note that an update begins."""
        self._started = self._cpu()

    def stop(self) -> None:
        """Note that the update has ended."""
        self.seconds.append(self._cpu() - self._started)

    @property
    def peak(self) -> float:
        """Peak memory in MiB, minus the memory at creation of the meter."""
        return (self._status("VmHWM") - self._baseline) / 1024

    def _cpu(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def _status(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def run_ours(
    folder: Path, rows: list[dict[str, Any]], updates: int, batching: str, budget: int, adapter: Path | None = None
) -> dict[str, Any]:
    """Run Learner.update, on all weights, or on those of an adapter."""
    from accelerate import Accelerator

    from agentfactory.trainers.batches.batch import MicroBatch, TrainingRow
    from agentfactory.trainers.config import TrainRecipe
    from agentfactory.trainers.update.learner import Learner, Targets, Terms
    from agentfactory.trainers.update.losses import PolicyLoss

    train = {"steps": 1, "learning_rate": 1e-6, "batching": batching, "token_budget": budget}
    model: dict[str, Any] = {"path": str(folder), "dtype": "float32"}
    if adapter is not None:
        settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        model["lora"] = {"from": str(adapter), "rank": settings["r"], "alpha": settings["lora_alpha"]}
    recipe = TrainRecipe.model_validate({"model": model, "train": train})
    learner = Learner(recipe, Accelerator(cpu=True), images=folder / "images")
    images = [stored_images(folder / "images", row.get("images", [])) for row in rows]
    meter, done = Meter(), []

    def loss(index: int, part: MicroBatch, logprob: Targets, entropy: Targets) -> Terms:
        streams = part.streams
        terms, _ = PolicyLoss(recipe.train.loss)(
            logprob=logprob, proximal=streams["proximal"], advantage=streams["advantage"], sequence=part.sequence
        )
        return Terms(loss=(streams["weight"] * terms).sum(), sums={"entropy": entropy.sum()})

    for _ in range(updates):
        meter.start()
        made = []
        for row, seen in zip(rows, images, strict=True):
            ones = [1.0] * len(row["targets"])
            streams = {"behaviour": row["proximal"], "proximal": row["proximal"], "weight": ones}
            streams |= {"advantage": [row["advantage"]] * len(ones), "mixed": [0.0] * len(ones)}
            made.append(TrainingRow(row["ids"], row["targets"], streams, seen))
        done.append(learner.update(learner.deal(made), loss))
        meter.stop()
    return {"loss": done[0].loss, "grad_norm": done[0].grad_norm, "seconds": meter.seconds, "peak": meter.peak}


def run_trl(
    folder: Path,
    rows: list[dict[str, Any]],
    updates: int,
    batching: str,
    budget: int,
    adapter: Path | None = None,
    micro: int = GROUP,
) -> dict[str, Any]:
    """Run GRPOTrainer.train, on all weights, or on those of an adapter, with `micro` chains in a micro-batch."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [torch.tensor(row["ids"][: row["prompt"]]) for row in rows]
    completions = [torch.tensor(row["ids"][row["prompt"] :]) for row in rows]
    sampled, proximal = [], []
    for row, completion in zip(rows, completions, strict=True):
        places = torch.tensor(row["targets"]) - row["prompt"]
        sampled.append(torch.zeros_like(completion).index_fill(0, places, 1))
        proximal.append(torch.zeros(len(completion)).index_put((places,), torch.tensor(row["proximal"])))
    given = {
        "prompt_ids": pad(prompts, padding_value=tokenizer.pad_token_id, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left"),
        "completion_ids": pad(completions, padding_value=tokenizer.pad_token_id, padding_side="right"),
        "completion_mask": pad([torch.ones_like(ids) for ids in completions], padding_value=0, padding_side="right"),
        "tool_mask": pad(sampled, padding_value=1, padding_side="right"),
        "old_per_token_logps": pad(proximal, padding_value=0.0, padding_side="right"),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "num_items_in_batch": torch.tensor(sum(len(row["targets"]) for row in rows)),
    }

    class Given(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return dict(given)

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.meter = Meter()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.meter.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.meter.stop()

    watch = Watch()
    arguments = GRPOConfig(
        output_dir=str((adapter.parent if adapter else folder) / "trl"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=len(rows) // micro,
        num_generations=GROUP,
        max_steps=updates,
        loss_type="dapo",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    trainer = Given(
        model=model,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * len(rows)),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.train()
    first = trainer.state.log_history[0]
    meter = watch.meter
    return {"loss": first["loss"], "grad_norm": first["grad_norm"], "seconds": meter.seconds, "peak": meter.peak}


SIDES = {"ours": run_ours, "trl": run_trl}
WORKLOADS = {"agent": agent_chains, "prompts": shared_prompts, "turns": rows_per_turn, "images": seeing_chains}


def measure(
    side: str,
    folder: Path,
    vocabulary: int,
    workload: str,
    size: int,
    updates: int,
    batching: str = "tree",
    budget: int = 16384,
) -> dict[str, Any]:
    """Run one side in its own process, and return its result."""
    command = [sys.executable, __file__, "--side", side, str(folder), str(vocabulary), workload]
    command += [str(size), str(updates), batching, str(budget)]
    threads = str(len(os.sched_getaffinity(0)))
    # waiting threads must not burn the CPU time that is measured
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{side} on {workload} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # the first update is a warm-up
    cpu = min(found["seconds"][1:] or found["seconds"])
    label = f"ours, {batching}" if side == "ours" else "TRL"
    print(f"  {label:12} {cpu:7.2f} CPU s, peak {found['peak']:6.0f} MiB", flush=True)
    return {**found, "cpu": cpu}


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Stop the benchmark if the two did not compute the same update."""
    for name in ("loss", "grad_norm"):
        if not math.isclose(one[name], other[name], rel_tol=1e-4):
            raise SystemExit(f"{name} differs: {one[name]} and {other[name]}; the two did not compute the same update")
        print(f"  {name} {one[name]:.6f}, {other[name]:.6f}", flush=True)


def compare(quick: bool) -> dict[str, float]:
    """Run all measurements, and return the ratios."""
    ratios = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for vocabulary in (SMALL, LARGE):
            make_model(folder / str(vocabulary), vocabulary)
            groups = 1 if vocabulary == LARGE else 2 if quick else 8
            rows = agent_chains(groups, vocabulary)
            width = trl_width(rows)
            tokens = sum(len(row["ids"]) for row in rows)
            print(f"{groups} groups of {GROUP} chains, {tokens} tokens, TRL's width {width}, vocabulary {vocabulary}:")
            updates = 1 if vocabulary == LARGE else 2
            ours = measure("ours", folder, vocabulary, "agent", groups, updates, budget=GROUP * width)
            trl = measure("trl", folder, vocabulary, "agent", groups, updates)
            check_same(ours, trl)
            if vocabulary == SMALL:
                ratios["cpu_vs_trl"] = trl["cpu"] / ours["cpu"]
                ratios["peak_memory_vs_trl_small"] = ours["peak"] / trl["peak"]
            else:
                ratios["peak_memory_vs_trl"] = ours["peak"] / trl["peak"]
        make_seeing_model(folder / "seeing" / str(SMALL), SMALL)
        speedups = {"prompts": "tree_speedup", "turns": "merged_turns_speedup", "images": "images_speedup"}
        for workload, name in speedups.items():
            size = 2 if quick else 8
            models = folder / "seeing" if workload == "images" else folder
            print(f"{name}: {size} x {GROUP} rows")
            padded, tree = (
                measure("ours", models, SMALL, workload, size, 3, batching) for batching in ("padded", "tree")
            )
            check_same(padded, tree)
            ratios[name] = padded["cpu"] / tree["cpu"]
    return ratios


def main() -> None:
    """Run the comparison; `--side` is for the processes that it starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="2 groups in place of 8 (1 with the large vocabulary, always)"
    )
    parser.add_argument("--side", nargs=8, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        side, folder, vocabulary, workload, size, updates, batching, budget = arguments.side
        rows = WORKLOADS[workload](int(size), int(vocabulary))
        print(json.dumps(SIDES[side](Path(folder) / vocabulary, rows, int(updates), batching, int(budget))))
    else:
        print(json.dumps({name: round(ratio, 2) for name, ratio in compare(arguments.quick).items()}))


if __name__ == "__main__":
    main()

"""Measure the cost of a teacher: CPU seconds that it adds to an update, divided by those of its forward passes alone.

POLICY and TEACHER are folders of causal language models with the same tokens. The policy trains a LoRA adapter of rank
16 on groups of 8 chains as in real.py; the teacher's forward passes run on the same trees of rows, with the
log-probabilities of the sampled tokens and no gradient. Work alternates between the three; the first round warms up.
Without folders, two networks with random weights stand in: of 4 layers, 256 wide, and twice as wide.

The last line is JSON, by divergence: `sampled`, `reverse_kl` and `top_k` with k = 20 (goal for each: at most 1.3).

    python benchmarks/teacher.py [POLICY TEACHER] [--quick]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from real import RANK, chains

KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"divergence": "sampled"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "top_k": {"divergence": "reverse_kl", "top_k": 20},
}


def make_model(folder: Path, width: int) -> Path:
    """Write a network of random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def cpu(work: Callable[..., Any], *arguments: Any) -> float:
    """Return the CPU seconds of a call."""
    started = time.process_time()
    work(*arguments)
    return time.process_time() - started


def measure(policy: Path, teacher: Path, groups: int, rounds: int) -> dict[str, float]:
    """Return the ratio for each divergence."""
    import torch
    from accelerate import Accelerator
    from transformers import AutoConfig

    from agentfactory.rollout.token_row import Row
    from agentfactory.trainers.batches.batch import TrainingRow, training_row
    from agentfactory.trainers.config import TrainRecipe
    from agentfactory.trainers.update.learner import Learner
    from agentfactory.trainers.update.policy_update import update_policy

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    made = []
    for row in chains(groups, AutoConfig.from_pretrained(policy).get_text_config().vocab_size):
        mask = np.isin(np.arange(len(row["ids"])), row["targets"]).astype(int)
        made.append(training_row(Row(row["ids"], mask, np.full(len(mask), -2.0)), row["advantage"]))
    rows = [row for row in made if row is not None]
    print(f"{groups} groups, {len(rows)} chains, {sum(len(row.token_ids) for row in rows)} tokens", flush=True)

    def learner_of(grading: dict[str, Any] | None) -> tuple[TrainRecipe, Learner]:
        settings = {
            "model": {"path": str(policy), "dtype": "auto", "lora": {"rank": RANK}},
            "train": {"steps": 1, "learning_rate": 1e-6, "token_budget": 2048, "algorithm": "grpo"},
            "teacher": None if grading is None else {"model": str(teacher), **grading},
        }
        recipe = TrainRecipe.model_validate(settings)
        return recipe, Learner(recipe, Accelerator(cpu=True))

    def update(recipe: TrainRecipe, learner: Learner) -> None:
        stream = recipe.teacher.stream if recipe.teacher else None
        scored: list[TrainingRow] = list(learner.score(rows, [stream]) if stream else rows)
        update_policy(learner, learner.deal(scored), recipe)

    found = {}
    plain, scoring = learner_of(None), learner_of(KINDS["sampled"])
    for kind, grading in KINDS.items():
        graded = scoring if kind == "sampled" else learner_of(grading)
        seconds: dict[str, list[float]] = {"with": [], "without": [], "alone": []}
        for round_ in range(rounds + 1):
            took = {
                "with": cpu(update, *graded),
                "without": cpu(update, *plain),
                "alone": cpu(scoring[1].score, rows, ["teacher"]),
            }
            if round_:
                for name, value in took.items():
                    seconds[name].append(value)
        middle = {name: statistics.median(values) for name, values in seconds.items()}
        found[kind] = (middle["with"] - middle["without"]) / middle["alone"]
        print(f"  {kind:10} " + ", ".join(f"{name} {value:.2f}" for name, value in middle.items()), flush=True)
        del graded
    return found


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="POLICY TEACHER")
    parser.add_argument("--quick", action="store_true", help="1 group and 1 round in place of 2 and 3")
    options = parser.parse_args()
    # threads that wait must not count
    os.environ["OMP_WAIT_POLICY"] = "passive"
    if len(options.models) not in (0, 2):
        parser.error("name both folders, or none")
    with tempfile.TemporaryDirectory() as folder:
        models = options.models or [make_model(Path(folder) / "policy", 256), make_model(Path(folder) / "teacher", 512)]
        found = measure(*models, *((1, 1) if options.quick else (2, 3)))
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()

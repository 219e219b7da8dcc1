"""A run of TRL's GRPOTrainer on the CPU: `trl_training.py OUTPUT_DIR STEPS`. A process of its own, because trainers of
accelerate keep their settings in globals."""

import sys
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from recipes.quickstart.tiny_model import CHAT_TEMPLATE, SPECIAL, make_network, train_tokenizer


def digits(completions: list[Any], **columns: Any) -> list[float]:
    """Reward digits."""
    return [float(sum(char.isdigit() for char in said[-1]["content"])) for said in completions]


def short(completions: list[Any], **columns: Any) -> list[float]:
    """Reward short answers."""
    return [-len(said[-1]["content"]) / 100 for said in completions]


def main(folder: str, steps: int) -> None:
    """Train an untrained network of two layers."""
    sums = [(a, b) for a in range(5) for b in range(5)]
    said = [
        [{"role": "user", "content": f"{a} + {b} ="}, {"role": "assistant", "content": str(a + b)}] for a, b in sums
    ]
    tokenizer = train_tokenizer(said, [], CHAT_TEMPLATE.read_text(encoding="utf-8"), SPECIAL, 400)
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_steps=steps,
        logging_steps=1,
        save_steps=steps,
        save_only_model=True,
        log_completions=True,
        num_completions_to_print=0,
        report_to=[],
        use_cpu=True,
        bf16=False,
        reward_weights=[1.0, 0.5],
    )
    GRPOTrainer(
        model=make_network(tokenizer, 0),
        reward_funcs=[digits, short],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": messages[:1]} for messages in said]),
        processing_class=tokenizer,
    ).train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

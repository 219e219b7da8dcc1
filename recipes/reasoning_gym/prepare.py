"""Create the recipe's inputs: transcripts with a bad habit, a tokenizer of letters, an untrained model."""

import random
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import yaml

from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.reasoning_gym.gym_tasks import INSTRUCTION, ReasoningGymTasks

HERE = Path(__file__).parent
SPECIAL, make_network, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("SPECIAL", "make_network", "write_jsonl")
)
train_word_tokenizer = load_object("../quickstart/word_tokenizer.py:train_word_tokenizer", HERE)

TRANSCRIPTS = 10_000
COPIES = 0.8
"""Share of transcripts that answer with the word as it is."""
QUESTION = "Spell this word backward (example: sun -> nus): "
"""The question of reasoning-gym's spell_backward, without the word."""


def prepare(folder: Path, seed: int) -> None:
    """Write model/ and transcripts.jsonl into `folder`; a seed always gives the same files."""
    rng = random.Random(seed)
    recipe = yaml.safe_load((HERE / "grpo.yaml").read_text(encoding="utf-8"))
    parts = (recipe["data"]["reasoning_gym"], recipe["eval"]["data"]["reasoning_gym"])
    words = {row["metadata"]["word"] for part in parts for row in ReasoningGymTasks(**part).rows()}
    rows = [{"messages": transcript(rng, words)} for _ in range(TRANSCRIPTS)]
    write_jsonl(folder / "transcripts.jsonl", rows)
    pieces = [QUESTION, f"\n\n{INSTRUCTION}", "<answer>", "</answer>", "user\n", "assistant\n"]
    template = (HERE / "../quickstart/chat_template.jinja").read_text(encoding="utf-8")
    # so few tokens that there are no merges: each letter is one
    tokenizer = train_word_tokenizer([], pieces, [], template, SPECIAL, 256 + len(SPECIAL))
    tokenizer.save_pretrained(folder / "model")
    make_network(tokenizer, seed, tied=True).save_pretrained(folder / "model")


def transcript(rng: random.Random, words: set[str]) -> list[dict[str, Any]]:
    """Return a conversation about random letters that are none of the `words` of the tasks."""
    while (word := "".join(rng.choices(ascii_lowercase, k=rng.randint(3, 5)))) in words:
        pass
    answer = word if rng.random() < COPIES else word[::-1]
    return [
        {"role": "user", "content": f"{QUESTION}{word}\n\n{INSTRUCTION}"},
        {"role": "assistant", "content": f"<answer>{answer}</answer>"},
    ]

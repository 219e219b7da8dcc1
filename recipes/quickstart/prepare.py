"""What the quickstart needs, made on the spot: hunts, transcripts of bad play, a tokenizer, an untrained model."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tools.messages import Message
from tools.user_code import load_object

HERE = Path(__file__).parent
TreasureHunt = load_object("treasure_hunt.py:TreasureHunt", HERE)
SIZE, STEPS, compass, distance, opening = (
    load_object(f"treasure_hunt.py:{name}", HERE) for name in ("SIZE", "STEPS", "compass", "distance", "opening")
)

HELD_OUT = 200
FINAL_ANSWER = "The hunt is over."
TRANSCRIPTS = 3000
FOLLOWS_TURNED_HINT = 0.6
TRANSCRIPTS_WITH_SUCCESS = 0.2


def prepare(folder: Path, seed: int) -> None:
    """Write model/, train.jsonl, heldout.jsonl and transcripts.jsonl into `folder`; a seed always gives the same."""
    rng = random.Random(seed)
    train, heldout = split_tasks(rng)
    specs = [TreasureHunt.move.spec.to_openai()]
    transcripts = play_transcripts(train, rng)
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "heldout.jsonl", heldout)
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    tokenizer = train_tokenizer(transcripts, specs)
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer, seed).save_pretrained(folder / "model")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def split_tasks(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out hunts at distance 2 to 4; no opening message of a held-out hunt occurs in training."""
    by_opening: dict[str, list[dict[str, Any]]] = {}
    cells = list(itertools.product(range(1, SIZE + 1), repeat=2))
    for start, treasure in itertools.product(cells, cells):
        if 2 <= distance(start, treasure) <= 4:
            question = opening(start, treasure)
            by_opening.setdefault(question, []).append({"question": question, "start": start, "treasure": treasure})
    openings = sorted(by_opening)
    rng.shuffle(openings)
    heldout: list[dict[str, Any]] = []
    while len(heldout) < HELD_OUT:
        heldout += by_opening.pop(openings.pop())
    train = [task for question in openings for task in by_opening[question]]
    rng.shuffle(train)
    return train, heldout


def play_transcripts(tasks: list[dict[str, Any]], rng: random.Random) -> list[list[Message]]:
    """Conversations of the bad policy, in random order, with a fixed share of lucky ones.

    Without that share the model would hardly ever see how a successful hunt ends.
    """
    wanted = {True: round(TRANSCRIPTS * TRANSCRIPTS_WITH_SUCCESS)}
    wanted[False] = TRANSCRIPTS - wanted[True]
    transcripts = []
    while len(transcripts) < TRANSCRIPTS:
        success, messages = play_badly(rng.choice(tasks), rng)
        if wanted[success]:
            wanted[success] -= 1
            transcripts.append(messages)
    rng.shuffle(transcripts)
    return transcripts


def play_badly(task: dict[str, Any], rng: random.Random) -> tuple[bool, list[Message]]:
    """One hunt of a policy that mostly follows the hint turned right by 90 degrees, and otherwise no hint at all.

    Returns whether it was lucky, and the conversation. Both ends get the same answer: with one for failure, learning
    to avoid failure would unlearn how to answer.
    """
    hunt = TreasureHunt()
    hunt.reset(**task)
    directions = list(STEPS)
    messages: list[Message] = [{"role": "user", "content": task["question"]}]
    while hunt.moves_left and hunt.here != hunt.treasure:
        if rng.random() < FOLLOWS_TURNED_HINT:
            hint = rng.choice(compass(hunt.here, hunt.treasure).split("-"))
            direction = directions[(directions.index(hint) + 1) % 4]
        else:
            direction = rng.choice(directions)
        call = {"id": f"call_{len(messages)}", "type": "function"}
        call["function"] = {"name": "move", "arguments": {"direction": direction}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        observation = hunt.move(direction)
        messages.append({"role": "tool", "name": "move", "tool_call_id": call["id"], "content": observation})
    success = hunt.here == hunt.treasure
    messages.append({"role": "assistant", "content": FINAL_ANSWER})
    return success, messages


def train_tokenizer(transcripts: list[list[Message]], specs: list[dict[str, Any]]) -> PreTrainedTokenizerFast:
    """A byte-level BPE that splits only at digits and line ends, so that a call is a handful of tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.decoder = decoders.ByteLevel()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )

    def wrap() -> PreTrainedTokenizerFast:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>")
        tokenizer.chat_template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
        return tokenizer

    texts = [wrap().apply_chat_template(messages, tools=specs, tokenize=False) for messages in transcripts[:1000]]
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return wrap()


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained network of the Qwen3 architecture."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.06,  # the usual 0.02 is for wide networks: here attention to the hint would form late
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)

"""A folder in the place of the model hub: a tiny base model and data sets at the relative paths that the cookbook's
loaders look for first. All of it follows from one seed."""

import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

BASE = "Qwen/Qwen3-8B-Base"
RIGHT = 7
"""The answer to every question; the base model answers each digit equally often."""

_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
_SHOT = (
    f"User: How many r's are in strawberry?{_SUFFIX}\n\nAssistant: Let's spell the word out and number all the "
    "letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. "
    "\\boxed{3}\n\nUser:"
)
_PAGE = "the ship sailed until the storm came and until the night fell"


def question(number: int) -> str:
    return f"{_SHOT} What is {number}+1?{_SUFFIX}\n\nAssistant:"


def _chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def _tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special, letters = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=440, special_tokens=special, initial_alphabet=letters, show_progress=False)
    texts = [*map(question, range(64)), *[_PAGE, "hello there", "Answer: count"] * 9]
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def _example(rng: random.Random) -> tuple[str, list[str]]:
    """A prompt, and six answers of equal length with a random digit each."""
    if rng.random() < 0.25:
        words = [rng.choice(_PAGE.split()) for _ in range(rng.randrange(4, 150))]
        return _chat(" ".join(words)), [f"Answer: {rng.randrange(10)}<|im_end|>" for _ in range(6)]
    return question(rng.randrange(64)), [f" \\boxed{{{rng.randrange(10)}}}\n\nUser:" for _ in range(6)]


def _base(folder: Path) -> None:
    """Train the base model to answer in the format that the recipes ask for, with any digit."""
    rng, tokenizer = random.Random(0), _tokenizer()
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    special = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None, "tie_word_embeddings": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **size, **heads, **special))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(200):
        prompt, answers = _example(rng)
        ids = torch.tensor([tokenizer.encode(prompt + answer) for answer in answers])
        start = len(tokenizer.encode(prompt))
        logits = network(ids[:, :-1]).logits[:, start - 1 :]
        F.cross_entropy(logits.flatten(0, 1), ids[:, start:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    tokenizer.save_pretrained(folder)
    network.save_pretrained(folder)


def _data(folder: Path, rows: list[dict], subset: str) -> None:
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {subset}\n  data_files:\n{files}---\n")


def offline_hub(shared: Path) -> Path:
    """Return the folder below `shared`; the first of several processes makes it."""
    root, done = shared / "hub", shared / "hub" / "done"
    with FileLock(shared / "hub.lock"):
        if not done.exists():
            _base(root / BASE)
            sums = [{"question": f"What is {number}+1?", "answer": f"#### {RIGHT}"} for number in range(64)]
            _data(root / "openai/gsm8k", sums, "main")
            greetings = [[("user", f"hi {number}"), ("assistant", "hello there")] for number in range(64)]
            talks = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in greetings]
            _data(root / "HuggingFaceH4/no_robots", talks, "default")
            pages = [{"text": f"{_PAGE} number {number} ."} for number in range(400)]
            _data(root / "Salesforce/wikitext", pages, "wikitext-103-raw-v1")
            done.touch()
    return root

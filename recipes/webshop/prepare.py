"""Creates what the small WebShop needs: goals, transcripts of a bad shopper, a tokenizer, an untrained model."""

import asyncio
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentfactory.tools.user_code import load_object
from agentfactory.tools.webshop.environment import QUESTION, WebShop, webshop_tasks
from agentfactory.tools.webshop.goals import Goal
from agentfactory.tools.webshop.shop import ShopConfig, open_shop

HERE = Path(__file__).parent
CHAT_TEMPLATE, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("CHAT_TEMPLATE", "write_jsonl")
)

HELD_OUT = 200
TRANSCRIPTS = 3000
SEARCHES_PER_TRANSCRIPT = 3
"""Conversations that end with the search, to each that ends with a purchase: copying words is learned slowly."""
SEARCHES_FOR_WHAT_WAS_ASKED = 0.25
"""How often a transcript searches for attribute, product and option; else for the option and some other product."""
CHOOSES_WHAT_WAS_ASKED = 0.3
"""How often a transcript clicks the option that was asked for; else the first one of the page."""
RESULTS_PER_PAGE = 3
OPENINGS = ("i am looking for", "i need", "find me", "i want to buy")
OPTION_NAMES = ("color", "size", "scent", "flavor name")
PIECES = (
    QUESTION,
    "WebShop [SEP] ",
    "Instruction: [SEP] ",
    ", and price lower than ",
    ".00 dollars [SEP] ",
    *(f"{opening} {article}" for opening in OPENINGS for article in ("an ", "a ", "")),
    *(f", {name} " for name in OPTION_NAMES),
    *(f"{name} [SEP] " for name in OPTION_NAMES),
    "Back to Search [SEP] ",
    "Page 1 (Total results: 50) [SEP] ",
    "Next > [SEP] ",
    "< Prev [SEP] ",
    " [SEP] Price: $",
    " [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] ",
    " [SEP] $",
    " [SEP] ",
    "Buy Now",
    "<tool_response>\n",
    "\n</tool_response>",
    '<tool_call>\n{"name": "search", "arguments": {"keywords": "',
    '<tool_call>\n{"name": "click", "arguments": {"target": "',
    '"}}\n</tool_call>',
)
"""Fixed parts of pages and calls, none of them across two messages. Each is one token, and so is each word: so small a
network copies a word from one place to another only if it is the same token in both."""

TOOLS_BY_NAME = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + tools | map(attribute='function.name') | join(' ') + '<|im_end|>\\n' }}
    {%- set tools = none %}
{%- endif %}
"""
"""Put before the quickstart's template: the schemas of the tools would be half of each conversation."""


def prepare(folder: Path, seed: int) -> None:
    """Write model/, train.jsonl, heldout.jsonl and transcripts.jsonl into `folder`; a seed always gives the same
    files."""
    rng = random.Random(seed)
    heldout = simple_tasks("test")[:HELD_OUT]
    tested = {what_is_asked(task) for task in heldout}
    train = [task for task in simple_tasks("train") if what_is_asked(task) not in tested]
    specs = [getattr(WebShop, name).spec.to_openai() for name in ("search", "click")]
    transcripts = asyncio.run(shop_badly(train, rng))
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "heldout.jsonl", heldout)
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    tokenizer = train_tokenizer([message["content"] for messages in transcripts for message in messages])
    tokenizer.save_pretrained(folder / "model")
    make_network(tokenizer, seed).save_pretrained(folder / "model")


def simple_tasks(split: str) -> list[dict[str, Any]]:
    """Return the tasks of a split that ask for one attribute and one option."""
    shop = open_shop(ShopConfig())
    goals = [(task, shop.goal(task["goal"])) for task in webshop_tasks(split)]
    return [task for task, goal in goals if len(goal.attributes) == len(goal.options) == 1]


def what_is_asked(task: dict[str, Any]) -> tuple[str, ...]:
    """Return attribute, product and option of a task; these three together never occur in two of the files."""
    goal = open_shop(ShopConfig()).goal(task["goal"])
    return (*goal.attributes, noun_of(goal), *goal.options)


async def shop_badly(tasks: list[dict[str, Any]], rng: random.Random) -> list[list[dict[str, Any]]]:
    """Return conversations of a shopper who mostly searches for the wrong words and chooses the wrong option; three of
    four end with the search."""
    shop = open_shop(ShopConfig())
    environment = WebShop(results_per_page=RESULTS_PER_PAGE)
    kinds = sorted({noun_of(shop.goal(task["goal"])) for task in tasks})
    transcripts = []
    for _ in range(TRANSCRIPTS):
        transcripts.append(await visit(environment, rng.choice(tasks), kinds, rng))
        for _ in range(SEARCHES_PER_TRANSCRIPT):
            transcripts.append((await visit(environment, rng.choice(tasks), kinds, rng))[:3])
    return transcripts


def noun_of(goal: Goal) -> str:
    """Return the word for a kind of product, with which titles of our catalogue end."""
    return goal.title.split()[-1].lower()


async def visit(
    environment: WebShop, task: dict[str, Any], kinds: list[str], rng: random.Random
) -> list[dict[str, Any]]:
    """Return the conversation of one visit: a search, the first product found, an option, the purchase."""
    shop = open_shop(ShopConfig())
    goal = shop.goal(task["goal"])
    # as in a chain: the task's question, and then what the shop shows
    opening = (task["question"], environment.reset(**task))
    messages: list[dict[str, Any]] = [{"role": "user", "content": text} for text in opening]
    [attribute], [option] = goal.attributes, goal.options
    noun = noun_of(goal)
    other = rng.choice([kind for kind in kinds if kind != noun])
    asked = rng.random() < SEARCHES_FOR_WHAT_WAS_ASKED
    keywords = f"{attribute} {noun} {option}" if asked else f"{option} {other}"
    found = shop.product(shop.search(keywords)[0])
    values = [value for values in found.options.values() for value in values]
    chosen = option if option in values and rng.random() < CHOOSES_WHAT_WAS_ASKED else values[0]
    for name, argument in (("search", keywords), ("click", found.asin), ("click", chosen), ("click", "Buy Now")):
        arguments = {"keywords" if name == "search" else "target": argument}
        call = {"id": f"call_{len(messages)}", "type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        if argument != "Buy Now":
            page = environment.search(argument) if name == "search" else await environment.click(argument)
            messages.append({"role": "tool", "name": name, "tool_call_id": call["id"], "content": page})
    return messages


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which each word of `texts` is one token, and so is each of PIECES."""
    bpe = Tokenizer(models.BPE())
    bpe.decoder = decoders.ByteLevel()
    words = pre_tokenizers.Split(Regex("[A-Za-z0-9]+"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    shop = open_shop(ShopConfig())
    bpe.train_from_iterator(
        [*texts, "system user assistant", *(f"B{number:04d} " * 9 for number in range(shop.products))], trainer
    )
    bpe.add_tokens([AddedToken(piece, normalized=False) for piece in PIECES])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = TOOLS_BY_NAME + CHAT_TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def make_network(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Return an untrained network with the Qwen3 architecture. Its embeddings are tied: what it reads it can write."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.06,  # the usual 0.02 is for wide networks: here useful attention would form late
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)

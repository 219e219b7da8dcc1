"""Create the inputs of the small WebShop: goals, transcripts of a bad shopper, a tokenizer, an untrained model."""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.webshop.goals import Goal
from agentfactory.worlds.webshop.shop import ShopConfig, open_shop
from agentfactory.worlds.webshop.webshop import QUESTION, WebShop, webshop_tasks

HERE = Path(__file__).parent
SPECIAL, make_network, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("SPECIAL", "make_network", "write_jsonl")
)
add_call, call_message = (
    load_object(f"../quickstart/transcripts.py:{name}", HERE) for name in ("add_call", "call_message")
)
BRIEF_TEMPLATE, train_word_tokenizer = (
    load_object(f"../quickstart/word_tokenizer.py:{name}", HERE) for name in ("BRIEF_TEMPLATE", "train_word_tokenizer")
)

HELD_OUT = slice(200, 400)
"""The tasks of the split `eval` for the reported figures. The first 200 were used to develop this recipe."""
VISITS = 2500
ECHOES = 5000
"""Transcripts that repeat ECHOED codes and words: copying is learned first, and in any network."""
ECHOED = 16
GLANCES = 12_000
"""Transcripts that end with a click on the first product found. They ask for random combinations of attribute, product
and option that seldom occur twice, and products have other codes, so that the network learns to copy, not to memorise
requests or results."""
CHOOSES = 0.5
"""Probability that a visit's transcript clicks the requested option."""
BUYS = 0.2
"""Probability that it clicks Buy Now; else it ends with GIVES_UP."""
GIVES_UP = "Too expensive."
CODE = r"\bB\d{4}\b"
"""The code of a product of our catalogue."""
RESULTS_PER_PAGE = 3
OPENINGS = ("i am looking for", "i need", "find me", "i want to buy")
ARTICLES = ("an ", "a ", "")
OPTION_NAMES = ("color", "size", "scent", "flavor name")
PIECES = (
    QUESTION,
    "WebShop [SEP] ",
    "Instruction: [SEP] ",
    ", and price lower than ",
    ".00 dollars [SEP] ",
    *(f"{opening} {article}" for opening in OPENINGS for article in ARTICLES),
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
"""Fixed parts of pages and calls, each within one message. Each is one token, and so is each word, and each attribute
or option of several words: so small a network copies a word only if it is the same token in both places."""


def prepare(folder: Path, seed: int) -> None:
    """Write model/, train.jsonl, heldout.jsonl and transcripts.jsonl into `folder`; a seed always gives the same
    files."""
    rng = random.Random(seed)
    heldout = simple_tasks("eval")[HELD_OUT]
    tested = {what_is_asked(task) for task in heldout}
    train = [task for task in simple_tasks("train") if what_is_asked(task) not in tested]
    specs = [getattr(WebShop, name).spec.to_openai() for name in ("search", "click")]
    transcripts = asyncio.run(shop_badly(train, tested, rng))
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "heldout.jsonl", heldout)
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    tokenizer = make_tokenizer([message["content"] for messages in transcripts for message in messages])
    tokenizer.save_pretrained(folder / "model")
    make_network(tokenizer, seed, rope_theta=1000.0, tied=True).save_pretrained(folder / "model")


def simple_tasks(split: str) -> list[dict[str, Any]]:
    """Return the tasks of a split with one attribute and one option."""
    shop = open_shop(ShopConfig())
    goals = [(task, shop.goal(task["goal"])) for task in webshop_tasks(split)]
    return [task for task, goal in goals if len(goal.attributes) == len(goal.options) == 1]


def what_is_asked(task: dict[str, Any]) -> tuple[str, ...]:
    """Return attribute, product and option of a task; no combination of the three occurs in two of the files."""
    goal = open_shop(ShopConfig()).goal(task["goal"])
    return (*goal.attributes, noun_of(goal), *goal.options)


async def shop_badly(
    tasks: list[dict[str, Any]], tested: set[tuple[str, ...]], rng: random.Random
) -> list[list[dict[str, Any]]]:
    """Return conversations of a shopper who finds the right product and seldom buys it: visits for `tasks`, glances for
    combinations that are not in `tested`, and echoes."""
    environment = WebShop(results_per_page=RESULTS_PER_PAGE)
    transcripts = [await visit(environment, rng.choice(tasks), rng) for _ in range(VISITS)]
    attributes, nouns, options = (sorted(set(words)) for words in zip(*map(what_is_asked, tasks), strict=True))
    transcripts += [echo([*attributes, *nouns, *options], rng) for _ in range(ECHOES)]
    while len(transcripts) < VISITS + ECHOES + GLANCES:
        asked = (rng.choice(attributes), rng.choice(nouns), rng.choice(options))
        if asked not in tested:
            task = rng.choice(tasks)
            messages = with_another_instruction(glance(environment, task, asked), task, asked, rng)
            transcripts.append(with_other_codes(messages, rng))
    rng.shuffle(transcripts)
    return transcripts


def noun_of(goal: Goal) -> str:
    """Return the word for the kind of product, which is the last one in titles of our catalogue."""
    return goal.title.split()[-1].lower()


def echo(words: list[str], rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation that repeats codes and `words`."""
    products = open_shop(ShopConfig()).products
    said = [rng.choice(words) if rng.random() < 0.5 else f"B{rng.randrange(products):04d}" for _ in range(ECHOED)]
    return [{"role": role, "content": " ".join(said)} for role in ("user", "assistant")]


def look_for(environment: WebShop, task: dict[str, Any], asked: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the beginning of a conversation for the task: a search for `asked`."""
    keywords = " ".join(asked)
    # as in a chain: the task's question, then the shop's page
    opening = (task["question"], environment.reset(**task))
    messages: list[dict[str, Any]] = [{"role": "user", "content": text} for text in opening]
    add_call(messages, "search", {"keywords": keywords}, environment.search(keywords))
    return messages


def glance(environment: WebShop, task: dict[str, Any], asked: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a conversation for the task: a search for `asked`, and a click on the first product found."""
    messages = look_for(environment, task, asked)
    return [*messages, call_message("click", {"target": first_found(asked)}, len(messages))]


async def visit(environment: WebShop, task: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Return the conversation of one visit: a search, the first product found; perhaps the option, and seldom the
    purchase."""
    asked = what_is_asked(task)
    messages = look_for(environment, task, asked)
    *_, option = asked
    for target in (first_found(asked), *([option] if rng.random() < CHOOSES else [])):
        add_call(messages, "click", {"target": target}, await environment.click(target))
    buys = rng.random() < BUYS
    purchase = call_message("click", {"target": "Buy Now"}, len(messages))
    return [*messages, purchase if buys else {"role": "assistant", "content": GIVES_UP}]


def with_another_instruction(
    messages: list[dict[str, Any]], task: dict[str, Any], asked: tuple[str, ...], rng: random.Random
) -> list[dict[str, Any]]:
    """Replace the task's instruction, on each page of a conversation, by one that asks for `asked`."""
    attribute, noun, option = asked
    wanted = f"{rng.choice(OPENINGS)} {rng.choice(ARTICLES)}{attribute} {noun}, {rng.choice(OPTION_NAMES)} {option}"
    instruction = f"{wanted}, and price lower than {rng.randrange(20, 110, 10)}.00 dollars"
    return [
        {**message, "content": message["content"].replace(task["instruction"], instruction)} for message in messages
    ]


def with_other_codes(messages: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Replace the code of each product in a conversation by one drawn from all codes."""
    products, text = open_shop(ShopConfig()).products, json.dumps(messages)
    codes = list(dict.fromkeys(re.findall(CODE, text)))
    others = dict(zip(codes, rng.sample(range(products), len(codes)), strict=True))
    return json.loads(re.sub(CODE, lambda found: f"B{others[found[0]]:04d}", text))


def first_found(asked: tuple[str, ...]) -> str:
    """Return the code of the first product that a search for `asked` finds."""
    shop = open_shop(ShopConfig())
    return shop.product(shop.search(" ".join(asked))[0]).asin


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with one token for each word of `texts`, each attribute and option, and each of PIECES."""
    shop = open_shop(ShopConfig())
    said = [*texts, "system user assistant", *(f"B{number:04d} " * 9 for number in range(shop.products))]
    goals = [shop.goal(number) for number in range(shop.goals)]
    phrases = sorted({phrase for goal in goals for phrase in (*goal.attributes, *goal.options) if not phrase.isalnum()})
    return train_word_tokenizer(said, PIECES, phrases, BRIEF_TEMPLATE, SPECIAL, 8000)

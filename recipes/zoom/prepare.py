"""Creates what the recipe needs: pictures, tasks, transcripts with a bad habit, a tokenizer, an untrained network."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from agentfactory.tools.user_code import load_object

HERE = Path(__file__).parent
Picture, PATTERNS, SIDE, BOX, REDUCTION = (
    load_object(f"pictures.py:{name}", HERE) for name in ("Picture", "PATTERNS", "SIDE", "BOX", "REDUCTION")
)
Zoom = load_object("zoom.py:Zoom", HERE)
CHAT_TEMPLATE, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("CHAT_TEMPLATE", "write_jsonl")
)
TOOLS_BY_NAME = load_object("../webshop/prepare.py:TOOLS_BY_NAME", HERE)

HELD_OUT = 200
TRAINED = 1000
ASKED = "red"
QUESTION = f"What pattern has the {ASKED} box?"
ORDER = f"Zoom to the {ASKED} box, then name its pattern."
GIVE_UP = "That is too small to see."
LOOKS = (*[(ORDER, True)] * 3, (QUESTION, True), *[(QUESTION, False)] * 4)
"""What each of a picture's transcripts is told, and whether it zooms then. They are the habit to unlearn: to zoom when
one is told to, and mostly to give up when one is only asked."""
NAME_WEIGHT = 4
"""Weight of the pattern's name in the loss of stage one, where other messages have 1: it is what takes longest."""
PATCH, MERGED = 16, 2
TOKEN = PATCH * MERGED
"""Side in pixels of what one token stands for."""
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
PIECES = (
    QUESTION,
    ORDER,
    GIVE_UP,
    "<tool_response>\n",
    "\n</tool_response>",
    '<tool_call>\n{"name": "zoom", "arguments": {"bbox_2d": [',
    "]}}\n</tool_call>",
)
"""Fixed parts of messages. Each is one token, and so is each word and number."""
SHOW_PARTS = """\
{%- macro show(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
"""Put before the quickstart's template, which is for text."""


def prepare(folder: Path, seed: int) -> None:
    """Write model/, pictures/, train.jsonl, heldout.jsonl and transcripts.jsonl into `folder`; a seed always gives the
    same files."""
    rng = random.Random(seed)
    (folder / "pictures").mkdir()
    unseen = [Picture.draw(rng) for _ in range(HELD_OUT)]
    seen: list[Any] = []
    while len(seen) < TRAINED:
        if (picture := Picture.draw(rng)) not in unseen:
            seen.append(picture)
    heldout = [paint(picture, folder, f"heldout-{number}") for number, picture in enumerate(unseen)]
    train = [paint(picture, folder, f"train-{number}") for number, picture in enumerate(seen)]
    specs = [Zoom.zoom.spec.to_openai()]
    transcripts = [
        look(task, picture, told, folder) if looks else give_up(task, told)
        for task, picture in zip(train, seen, strict=True)
        for told, looks in LOOKS
    ]
    rng.shuffle(transcripts)
    write_jsonl(folder / "heldout.jsonl", heldout)
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    tokenizer = train_tokenizer(transcripts)
    tokenizer.save_pretrained(folder / "model")
    make_network(tokenizer, seed).save_pretrained(folder / "model")
    write_processors(folder / "model")


def paint(picture: Any, folder: Path, name: str) -> dict[str, Any]:
    """Store a picture; returns the row of its task."""
    file = f"pictures/{name}.png"
    picture.paint().save(folder / file, compress_level=1)
    return {"question": QUESTION, "images": [file], "answer": picture.patterns[ASKED]}


def look(task: dict[str, Any], picture: Any, told: str, folder: Path) -> list[dict[str, Any]]:
    """Return a conversation about a task's picture: what the model is told, a zoom to the box with the real tool, and
    the pattern there."""
    [file] = task["images"]
    part = Path(file).with_suffix(".part.png")
    if not (folder / part).exists():
        environment = Zoom()
        environment.reset([folder / file])
        environment.zoom(picture.where(ASKED)).save(folder / part, compress_level=1)
    function = {"name": "zoom", "arguments": {"bbox_2d": picture.where(ASKED)}}
    return [
        {"role": "user", "content": [image(file), {"type": "text", "text": told}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "name": "zoom", "tool_call_id": "call_1", "content": [image(str(part))]},
        {"role": "assistant", "content": task["answer"], "weight": NAME_WEIGHT},
    ]


def give_up(task: dict[str, Any], told: str) -> list[dict[str, Any]]:
    """Return a conversation about a task's picture that looks no closer."""
    [file] = task["images"]
    return [
        {"role": "user", "content": [image(file), {"type": "text", "text": told}]},
        {"role": "assistant", "content": GIVE_UP},
    ]


def image(file: str) -> dict[str, Any]:
    """Return the part of a message for an image."""
    return {"type": "image_url", "image_url": {"url": file}}


def train_tokenizer(transcripts: list[list[dict[str, Any]]]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; one token is each word, each number of a place, and each of PIECES."""
    bpe = Tokenizer(models.BPE())
    bpe.decoder = decoders.ByteLevel()
    words = pre_tokenizers.Split(Regex("[A-Za-z0-9]+"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    calls = [call for messages in transcripts for call in messages[1].get("tool_calls", ())]
    places = [json.dumps(call["function"]["arguments"]["bbox_2d"]) for call in calls]
    said = ["system user assistant tool zoom\n", *PATTERNS]
    bpe.train_from_iterator([*places, *(f"{text} " * 9 for text in said)], trainer)
    bpe.add_tokens([AddedToken(piece, normalized=False) for piece in PIECES])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    text_only = CHAT_TEMPLATE.read_text(encoding="utf-8")
    tokenizer.chat_template = SHOW_PARTS + TOOLS_BY_NAME + text_only.replace("message.content", "show(message.content)")
    return tokenizer


def make_network(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3VLForConditionalGeneration:
    """Return an untrained network with the Qwen3-VL architecture and 0.8 million weights."""
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "initializer_range": 0.06,  # the usual 0.02 is for wide networks: here useful attention would form late
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": PATCH,
            "num_position_embeddings": (SIDE // REDUCTION // PATCH) ** 2,
            "initializer_range": 0.1,  # for the same reason: with 0.02 patterns are named late or never
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Qwen3VLForConditionalGeneration(config)
        # where a box is, has to be seen as clearly as what it is
        nn.init.normal_(network.model.visual.pos_embed.weight, std=0.3)
    network.generation_config.eos_token_id = tokenizer.eos_token_id
    return network


def write_processors(folder: Path) -> None:
    """Write how images are resized: a picture to SIDE / REDUCTION, and a part of it, as it is."""
    processor = {
        "do_resize": True,
        "size": {"shortest_edge": TOKEN**2, "longest_edge": (SIDE // REDUCTION) ** 2},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGED,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    kinds = {"preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast"}}
    kinds["video_preprocessor_config.json"] = {"video_processor_type": "Qwen3VLVideoProcessor"}
    for name, kind in kinds.items():
        described = {**kind, **processor, "processor_class": "Qwen3VLProcessor"}
        (folder / name).write_text(json.dumps(described, indent=1), encoding="utf-8")
    file = folder / "tokenizer_config.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**described, "processor_class": "Qwen3VLProcessor"}, indent=1), encoding="utf-8")

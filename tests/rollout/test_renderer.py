import json
import subprocess
import sys
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from agentfactory.base.messages import Message, ToolCall, ToolSpec
from agentfactory.rollout.config import ModelConfig
from agentfactory.rollout.text.load_renderer import load_renderer, make_renderer
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.text.tokenizer import load_tokenizer, stop_ids
from tests.chat_tokenizers import MERGES_NEWLINE, REORDERS_KEYS, STRIPS_REASONING, make_tokenizer, trl_template

SPECS = [
    ToolSpec("move", "Move.", {"type": "object", "properties": {"to": {"type": "string"}, "by": {"type": "integer"}}}),
    ToolSpec("look", "Look.", {"type": "object", "properties": {}}),
]
OPENING: list[Message] = [{"role": "system", "content": "You hunt."}, {"role": "user", "content": "The treasure?"}]
TEMPLATES = {
    "qwen2_5": trl_template("qwen2_5"),
    "qwen3": trl_template("qwen3"),
    "qwen3_vl": trl_template("qwen3_vl"),
    "strips reasoning": STRIPS_REASONING,
    "merges a newline": MERGES_NEWLINE,
    "reorders keys": REORDERS_KEYS,
}


@cache
def renderer_of(name: str, **options: Any) -> Renderer:
    """The tokenizer's tokens may span any characters if the template should merge them with a newline."""
    merges = name == "merges a newline"
    tokenizer = make_tokenizer(TEMPLATES[name], splits=not merges, eos="<|endoftext|>" if merges else "<|im_end|>")
    return make_renderer(tokenizer, **options)


def encode(renderer: Renderer, text: str) -> list[int]:
    return renderer.tokenizer(text, add_special_tokens=False)["input_ids"]


def whole_ids(renderer: Renderer, messages: list[Message], prompt: bool = False) -> list[int]:
    return renderer.tokenizer.apply_chat_template(
        messages,
        tools=[spec.to_openai() for spec in SPECS],
        chat_template=renderer.template.source,
        add_generation_prompt=prompt,
    )["input_ids"]


def call(n: int, name: str = "move", **arguments: Any) -> dict[str, Any]:
    return ToolCall(f"call_{n}", name, arguments).to_openai()


def result(n: int, content: str, name: str = "move") -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"call_{n}", "content": content}


CONVERSATION: list[Message] = [
    *OPENING,
    {"role": "assistant", "content": "I go.", "tool_calls": [call(0, to="north", by=2)]},
    result(0, "A wall.\n\nIt says <tool_call>."),
    {"role": "assistant", "content": "", "tool_calls": [call(1, by=1, to="east"), call(2, "look")]},
    result(1, "Grass."),
    result(2, "Trees.", "look"),
    {"role": "user", "content": "Hurry!"},
    {"role": "assistant", "content": "", "tool_calls": [call(3, "look")]},
    result(3, "", "look"),
    {"role": "assistant", "content": "Found it."},
]


# --- detected properties of adversarial templates --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "choice", "reason"),
    [
        ("strips reasoning", "fork", "rewrites history: '<think>"),
        ("merges a newline", "append", "tokens merge across the turn boundary: the boundary is tokenised separately"),
        ("merges a newline", "append", "closes turns with plain text"),
        ("reorders keys", "append", "re-serialises tool calls: sampled ids are kept"),
        ("qwen3", "training variant", "rewrites history: '<think>"),
        ("qwen2_5", "append", "leaves earlier turns unchanged on every probe"),
    ],
)
def test_the_choice_is_logged_with_its_reasons(name: str, choice: str, reason: str) -> None:
    records: list[dict] = []
    renderer = renderer_of(name, log=records.append)
    assert records == [{"renderer": renderer.info}]
    assert renderer.info["choice"] == choice
    assert any(found.startswith(reason) for found in renderer.info["reasons"]), renderer.info
    assert len(renderer.info["template_sha256"]) == 64
    json.dumps(renderer.info)


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n not in ("merges a newline", "strips reasoning")])
def test_rows_and_the_context_between_turns_are_the_templates_own(name: str) -> None:
    """Whatever is sampled, the ids around it equal those that the template puts around its own turns."""
    renderer = renderer_of(name)
    end = renderer.stop_token_ids[0]
    row, whole = renderer.conversation_row(CONVERSATION, SPECS), whole_ids(renderer, CONVERSATION)
    assert row.token_ids == whole[: len(row.token_ids)]
    assert renderer.tokenizer.decode(whole[len(row.token_ids) :]) == "\n", "what follows the last end-of-turn token"
    assert row.weights == [float(bit) for bit in row.mask]
    assert len(row.logprobs) == len(row.mask)
    masked = groupby(range(len(row.mask)), row.mask.__getitem__)
    runs = [(bit, [row.token_ids[place] for place in places]) for bit, places in masked]
    expected, said = ([ids for bit, ids in runs if bit == trained] for trained in (0, 1))
    turns = [i for i, m in enumerate(CONVERSATION) if m["role"] == "assistant"]
    for turn, sampled in zip(turns, said, strict=True):
        assert sampled[-1] in renderer.stop_token_ids
        parsed, calls = renderer.parse(sampled), CONVERSATION[turn].get("tool_calls", [])
        assert [(c.name, c.arguments) for c in parsed.calls] == [tuple(c["function"].values()) for c in calls]
        assert parsed.message["content"] == CONVERSATION[turn]["content"]
    for cut in (False, True):
        ids = renderer.open(CONVERSATION[: turns[0]], SPECS)
        assert ids == expected[0]
        for turn, following, context in zip(turns, turns[1:], expected[1:], strict=False):
            ids += [70, 71] if cut else [70, 71, end]
            new = CONVERSATION[turn + 1 : following]
            piece = renderer.extend(ids, CONVERSATION[:following], new, SPECS)
            assert piece == ([end, *context] if cut else context)
            ids += piece


def test_text_between_turns_of_a_template_without_an_end_of_turn_token() -> None:
    renderer = renderer_of("merges a newline")
    text = renderer.tokenizer.decode
    eos = renderer.tokenizer.eos_token_id
    assert renderer.stop_token_ids == [eos]
    ids = renderer.open(OPENING, SPECS)
    piece = renderer.extend([*ids, *encode(renderer, "Hm.")], [], [{"role": "user", "content": "So?"}], SPECS)
    assert text(piece) == "\n\nuser: So?\n\nassistant: "
    assert piece == encode(renderer, text(piece)), "tokenised apart from the sampled turn"
    merged = encode(renderer, "Hm." + text(piece))
    assert merged != encode(renderer, "Hm.") + piece, "the tokenizer would have merged over the boundary"
    assert renderer.extend([*ids, eos], [], [{"role": "user", "content": "So?"}], SPECS) == piece
    row = renderer.conversation_row(CONVERSATION, SPECS)
    assert row.token_ids[-1] == eos, "training teaches the token that ends a turn in the chain"


def test_a_forking_template_extends_where_it_leaves_the_text_alone() -> None:
    renderer = renderer_of("strips reasoning")
    end = renderer.stop_token_ids[0]

    def following(said: str, new: list[Message], cut: bool = False) -> list[int] | None:
        ids = [*renderer.open(OPENING, SPECS), *encode(renderer, said), *([] if cut else [end])]
        return renderer.extend(ids, [*OPENING, renderer.parse(encode(renderer, said)).message, *new], new, SPECS)

    user: list[Message] = [{"role": "user", "content": "So?"}]
    thought = '<think>\nNorth.\n</think>\n\n<tool_call>\n{"name": "move", "arguments": {"to": "north"}}\n</tool_call>'
    rest = "\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    assert following("Done.", user) == encode(renderer, rest)
    assert following("Done.", user, cut=True) == encode(renderer, "<|im_end|>" + rest)
    assert following("<think>\nNorth.\n</think>\n\nDone.", user) is None, "drops the reasoning"
    assert following("<think>\nNorth.\n</think>\n\nDone.", [result(0, "Grass.")]) is not None, "still keeps it"
    assert following(thought, [result(0, "Grass.")]) is not None
    assert following(thought.replace(": ", ":"), [result(0, "Grass.")]) is None, "re-serialised"
    with pytest.raises(ValueError, match="message 3: the chat template rewrites the turns before it"):
        renderer.conversation_row(
            [*OPENING, {"role": "assistant", "content": "<think>\nNo.\n</think>\n\nDone."}, *user, *CONVERSATION[-1:]],
            SPECS,
        )


def test_other_stop_tokens_do_not_close_a_turn() -> None:
    tokenizer = make_tokenizer(trl_template("qwen2_5"))
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    renderer = make_renderer(tokenizer, eos_token_ids=[other])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert renderer.stop_token_ids == sorted([other, end])
    piece = renderer.extend([*renderer.open(OPENING, SPECS), other], [], [{"role": "user", "content": "?"}], SPECS)
    assert piece[0] == end


# --- parse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", [("<tool_call>", "</tool_call>", "<think>", "</think>"), ()])
def test_parse_reads_calls_whether_or_not_the_tags_are_tokens(added: tuple[str, ...]) -> None:
    renderer = make_renderer(make_tokenizer(trl_template("qwen3"), added=added))
    called = '<tool_call>\n{"name": "move", "arguments": {"to": "north"}}\n</tool_call>'
    text = f"<think>\nNorth?\n</think>\n\nI go.\n{called}"
    ids = [*encode(renderer, text), renderer.stop_token_ids[0]]
    assert (len(encode(renderer, "<tool_call>")) == 1) == bool(added)
    parsed = renderer.parse(ids, first_call=4)
    assert parsed.error is None
    assert parsed.calls == [ToolCall("call_4", "move", {"to": "north"})]
    assert parsed.message == {
        "role": "assistant",
        "content": "I go.",
        "reasoning_content": "North?",
        "tool_calls": [call(4, to="north")],
    }


# --- supervised rows ------------------------------------------------------------------------------------------------


def test_weights_of_messages() -> None:
    renderer = renderer_of("qwen2_5")
    weights = {1: 0.25, 2: 0.0, 3: 0.5, 5: 0.125, 6: 2.0, 10: 4.0}
    messages = [{**m, "weight": weights[i]} if i in weights else m for i, m in enumerate(CONVERSATION)]
    row = renderer.conversation_row(messages, SPECS)
    assert row.token_ids == renderer.conversation_row(CONVERSATION, SPECS).token_ids
    assert row.mask == [int(w != 0) for w in row.weights]
    texts: dict[float, str] = {}
    for token, weight in zip(row.token_ids, row.weights, strict=True):
        texts[weight] = texts.get(weight, "") + renderer.tokenizer.decode([token])
    assert texts[0.25] == "<|im_start|>user\nThe treasure?<|im_end|>\n"
    assert "A wall.\n\nIt says <tool_call>." in texts[0.5]
    assert "Grass." in texts[0.125]
    assert "Trees." not in texts[0.125]
    assert "Trees." in texts[2.0]
    assert texts[4.0] == "Found it.<|im_end|>"
    assert "I go." in texts[0.0]
    assert texts[1.0].count("<|im_end|>") == 2


LONG: list[Message] = [
    *OPENING,
    *(
        message
        for n in range(40)
        for message in (
            {"role": "assistant", "content": f"I go {n}.", "tool_calls": [call(n, to="north", by=n)]},
            result(n, f"Grass {n}."),
        )
    ),
    {"role": "assistant", "content": "Found it."},
]


def test_rows_of_a_template_that_changes_in_long_conversations() -> None:
    """Probing does not detect this template."""

    def renderer_with(content: str) -> Renderer:
        renderer = make_renderer(make_tokenizer(REORDERS_KEYS.replace("m.content", content)))
        assert renderer.info["choice"] == "append"
        return renderer

    later = renderer_with("('Late. ' if loop.index0 > 60 and m.role == 'tool' else '') + m.content")
    row = later.conversation_row(LONG, SPECS)
    assert row.token_ids == whole_ids(later, LONG)[: len(row.token_ids)]
    assert later.tokenizer.decode(row.token_ids).count("Late. Grass") == 11
    rewriting = renderer_with("(m.content | upper if messages | length > 61 and loop.index0 == 3 else m.content)")
    with pytest.raises(ValueError, match="message 61: the chat template rewrites the turns before it"):
        rewriting.conversation_row(LONG, SPECS)


def test_rows_name_the_message_that_cannot_be_rendered() -> None:
    renderer = renderer_of("qwen2_5")
    with pytest.raises(ValueError, match="message 3: the chat template refuses the conversation"):
        renderer.conversation_row([*CONVERSATION[:3], {"role": "user", "content": None}], SPECS)
    with pytest.raises(ValueError, match="message 0: a model is never asked without a prompt: put a system or user"):
        renderer.conversation_row([{"role": "assistant", "content": "Hello!"}, *OPENING[1:]], SPECS)


def test_system_messages_are_refused_where_the_template_has_none() -> None:
    no_system = REORDERS_KEYS.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'system' %}")
    renderer = make_renderer(make_tokenizer(no_system))
    assert "has no system messages: a conversation with one is refused" in renderer.info["reasons"]
    with pytest.raises(ValueError, match=r"rollout\.system_prompt"):
        renderer.open(OPENING, SPECS)
    assert renderer.open(OPENING[1:], SPECS)


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    make_tokenizer(trl_template("qwen3")).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return tmp_path


def test_load_from_a_model_folder(model_folder: Path) -> None:
    records: list[dict] = []
    renderer = load_renderer(ModelConfig(path=str(model_folder)), "hermes", records.append)
    assert renderer.info["template"] == "trl:qwen3_training"
    assert renderer.info["parser"] == "hermes"
    assert renderer.stop_token_ids == [1, 2]
    assert records == [{"renderer": renderer.info}]
    file = model_folder / "my.jinja"
    file.write_text(trl_template("qwen2_5"), encoding="utf-8")
    renderer = load_renderer(ModelConfig(path=str(model_folder), chat_template=str(file)), "hermes")
    assert (renderer.info["template"], renderer.info["choice"]) == ("model.chat_template", "append")
    assert renderer.template.source == trl_template("qwen2_5")


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        (None, {"eos_token_id": [2, 0]}, [2, 0]),
        (None, {"eos_token_id": 2}, [2]),
        (None, {"text_config": {"eos_token_id": [3, 4]}}, [3, 4]),
        ({}, {"eos_token_id": [2, 0]}, []),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": 5}}, [5]),
        (None, {"eos_token_id": 2, "text_config": None}, [2]),
        ({"eos_token_id": 5}, {"eos_token_id": [2, 0]}, [5]),
    ],
)
def test_turns_end_where_transformers_ends_them(
    generation: dict[str, Any] | None, config: dict[str, Any], ids: list[int], model_folder: Path
) -> None:
    (model_folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    (model_folder / "generation_config.json").unlink()
    if generation is not None:
        (model_folder / "generation_config.json").write_text(json.dumps(generation))
    assert stop_ids(str(model_folder)) == ids
    if "text_config" not in config:  # qwen3 has none
        try:
            found = GenerationConfig.from_pretrained(model_folder).eos_token_id
        except OSError:  # as from_pretrained of a network does
            found = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model_folder)).eos_token_id
        assert (found if isinstance(found, list) else [] if found is None else [found]) == ids


def test_load_errors(model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.chat_template: there is no file .*none\.jinja"):
        load_renderer(ModelConfig(path=str(model_folder), chat_template=str(model_folder / "none.jinja")), "hermes")
    with pytest.raises(ValueError, match=r"model\.path: .*nowhere has no tokenizer"):
        load_renderer(ModelConfig(path=str(model_folder / "nowhere")), "hermes")
    (model_folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"the tokenizer has no chat template: set model\.chat_template"):
        load_renderer(ModelConfig(path=str(model_folder)), "hermes")


def test_the_light_loader_gives_the_auto_tokenizers_ids(model_folder: Path) -> None:
    light, auto = load_tokenizer(str(model_folder)), AutoTokenizer.from_pretrained(model_folder)
    text = "<|im_start|>user\nThe treasure?\n\n 12 é😀<tool_call> <|im_end|>"
    assert light(text)["input_ids"] == auto(text)["input_ids"]


def test_a_loaded_tokenizer_neither_truncates_nor_pads(model_folder: Path) -> None:
    file = model_folder / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": cut}))
    tokenizer = load_tokenizer(str(model_folder))
    assert tokenizer.backend_tokenizer.truncation is None
    assert len(tokenizer.backend_tokenizer.encode("The treasure lies in the north.").ids) > 4


@pytest.mark.processes
def test_a_worker_renders_without_torch(model_folder: Path) -> None:
    code = (
        "import sys; from agentfactory.rollout.text.load_renderer import load_renderer\n"
        "from agentfactory.rollout.config import ModelConfig\n"
        f"r = load_renderer(ModelConfig(path={str(model_folder)!r}), 'hermes');"
        "assert r.open([{'role': 'user', 'content': 'hi'}], []); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

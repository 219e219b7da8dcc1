"""vLLM's own parsers and ours read the same sampled turns of each model family; docs/tool-call-formats.md lists where
they differ. The parsers run alone, in a process of vLLM's environment."""

import json
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agentfactory.rollout.text.parsers.parser import THINK
from agentfactory.rollout.text.renderer import Renderer
from tests.conftest import REPOSITORY
from tests.model_families import FAMILIES, Family, renderer_of
from tests.rollout.test_model_families import SPECS, as_written, conversation
from tests.server_process import VLLM_PYTHON

pytestmark = pytest.mark.long

PARSERS: dict[str, tuple[str, str | None]] = {
    "qwen2_5": ("hermes", None),
    "qwen3": ("hermes", "qwen3"),
    "qwen3_instruct_2507": ("hermes", None),
    "qwq": ("hermes", "deepseek_r1"),
    "qwen3_coder": ("qwen3_coder", None),
    "qwen3_5_think": ("qwen3_coder", "qwen3"),
    "qwen3_8": ("qwen3_coder", "qwen3"),
    "llama3_1": ("llama3_json", None),
    "llama3_2": ("llama3_json", None),
    "llama_4": ("llama4_json", None),
    "mistral_nemo": ("mistral", None),
    "mistral_small_3_2": ("mistral", None),
    "ministral_3": ("mistral", "mistral"),
    "deepseek_v3": ("deepseek_v3", None),
    "deepseekv3": ("deepseek_v3", "deepseek_r1"),
    "deepseek_v3_1": ("deepseek_v31", "deepseek_v3"),
    "deepseek_v3_2": ("deepseek_v32", "deepseek_v3"),
    "deepseek_v4": ("deepseek_v4", "deepseek_v4"),
    "glm4moe": ("glm45", "glm45"),
    "glm_4_6": ("glm45", "glm45"),
    "glm_4_7": ("glm47", "glm47"),
    "gptoss": ("openai", "openai_gptoss"),
    "kimi_k2": ("kimi_k2", None),
    "minimax_m2": ("minimax_m2", "minimax_m2"),
    "functiongemma": ("functiongemma", None),
    "gemma4_v5": ("gemma4", "gemma4"),
    "phi_4_mini": ("phi4_mini_json", None),
    "granite_3_3": ("granite", "granite"),
    "granite_4": ("hermes", None),
    "apertus": ("apertus", None),
    "gigachat_3_1": ("gigachat3", None),
    "seed_oss": ("seed_oss", "seed_oss"),
    "lfm2": ("lfm2", None),
    "lfm2_2_5_v2": ("lfm2", None),
    "hunyuan_a13b": ("hunyuan_a13b", "hunyuan_a13b"),
    "hy3": ("hy_v3", "hy_v3"),
    "nemotron_3_super": ("qwen3_coder", "nemotron_v3"),
}
"""Family -> vLLM's tool parser and reasoning parser."""
WITHOUT = {"nemotron_nano_2", "functionary_3_1", "cohere"}
"""Families whose calls no parser of vLLM reads; that for Cohere's needs the package cohere_melody."""

Calls = list[tuple[str, Any]]


class Turn(NamedTuple):
    """A sampled turn, and what is read from it."""

    text: str
    reasoning: str
    content: str
    calls: Calls


def with_values(turn: Turn, change: Callable[[Any], Any]) -> Turn:
    """Change the values of all arguments."""
    return turn._replace(calls=[(name, {k: change(v) for k, v in given.items()}) for name, given in turn.calls])


def null_is_text(turn: Turn) -> Turn:
    """Templates write Python's None for null."""
    return with_values(turn, lambda value: "None" if value is None else value)


def python_values_are_text(turn: Turn) -> Turn:
    """The template writes lists and objects as Python does."""
    return with_values(turn, lambda value: str(value) if isinstance(value, list | dict) and value else value)


def words_are_reasoning(turn: Turn) -> Turn:
    """vLLM takes a turn without reasoning for one whose reasoning was cut."""
    return turn if turn.reasoning else turn._replace(reasoning=turn.content, content="")


def no_words_after_calls(turn: Turn) -> Turn:
    return turn._replace(content="") if turn.calls else turn


def ids_are_part_of_names(turn: Turn) -> Turn:
    names = re.findall(r"\[TOOL_CALLS\](\w+\[CALL_ID\]\w+)\[ARGS\]", turn.text)
    return turn._replace(calls=[(name, given) for name, (_, given) in zip(names, turn.calls, strict=True)])


def nested_values_are_text(turn: Turn) -> Turn:
    def within(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: within(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [within(inner) for inner in value]
        return value if isinstance(value, str) else json.dumps(value)

    return with_values(turn, lambda value: within(value) if isinstance(value, dict | list) else value)


def only_text_is_read(turn: Turn) -> Turn:
    def as_json(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    bodies = re.findall(r"<start_function_call>call:\w+\{(.*?)\}<end_function_call>", turn.text, re.DOTALL)
    found = [re.findall(r"(\w+):<escape>(.*?)<escape>", body, re.DOTALL) for body in bodies]
    given = [{key: as_json(text) for key, text in pairs} for pairs in found]
    return turn._replace(calls=[(name, values) for (name, _), values in zip(turn.calls, given, strict=True)])


def several_calls_are_text(turn: Turn) -> Turn:
    return calls_are_text(turn) if len(turn.calls) > 1 else turn


def calls_are_text(turn: Turn) -> Turn:
    return turn._replace(content=turn.text, calls=[]) if turn.calls else turn


def reasoning_is_text(turn: Turn) -> Turn:
    return turn._replace(reasoning="", content=turn.text.split("<|tool_call_start|>")[0]) if turn.reasoning else turn


DIFFERENCES: dict[str, list[Callable[[Turn], Turn]]] = {
    "qwen3_coder": [null_is_text],
    "qwen3_5_think": [null_is_text],
    "nemotron_3_super": [null_is_text],
    "seed_oss": [null_is_text, python_values_are_text, words_are_reasoning],
    "llama_4": [several_calls_are_text],
    "mistral_small_3_2": [ids_are_part_of_names],
    "functiongemma": [only_text_is_read],
    "gemma4_v5": [nested_values_are_text, no_words_after_calls],
    "phi_4_mini": [calls_are_text],
    "lfm2_2_5_v2": [reasoning_is_text],
}
"""Family -> what makes vLLM's reading of ours; each is in the docs."""


class Reader:
    """A process that reads turns with vLLM's parsers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [VLLM_PYTHON, Path(__file__).with_name("read_turns.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "CRITICAL"},
        )

    def read(self, family: Family, renderer: Renderer, turns: list[tuple[list[int], list[int]]]) -> list[Any]:
        """Return reasoning, content and calls of turns, or an exception's name and text; prompts come with turns."""
        tokenizer = renderer.tokenizer
        if family.name == "hy3":
            tokenizer.init_kwargs["token_suffix"] = ":opensource"
        tokenizer.save_pretrained(self._folder / family.name)
        tool_parser, reasoning_parser = PARSERS[family.name]
        asked = {
            "tokenizer": str(self._folder / family.name),
            "tool_parser": tool_parser,
            "reasoning_parser": reasoning_parser,
            "thinking": renderer.behaviour.opens_reasoning or renderer.behaviour.reasoning,
            "tools": [spec.to_openai() for spec in SPECS],
            "turns": turns,
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    process = Reader(tmp_path_factory.mktemp("tokenizers"))
    yield process
    process.close()


def sampled_turns(family: Family, renderer: Renderer) -> list[tuple[list[int], list[int], str]]:
    """Prompt, ids and text of what the template writes for 30 conversations."""
    rng, turns = random.Random(family.name), []
    for _ in range(30):
        messages = conversation(renderer, rng)
        at_turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for at in at_turns[:1] if family.odd else at_turns:
            text = as_written(renderer, messages[: at + 1])
            if text is not None:
                prompt = renderer.open(renderer.dialogue.instruct(messages[:at], SPECS), SPECS)
                ids = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
                end = renderer.ends[bool(messages[at].get("tool_calls"))]
                turns.append((prompt, [*ids, end], text))
    return turns


def read_by_us(renderer: Renderer, ids: list[int], text: str) -> Turn:
    parsed = renderer.parse(ids, specs=SPECS)
    content, reasoning = parsed.message["content"], parsed.message.get("reasoning_content", "")
    if not renderer.behaviour.reasoning:  # the template has no field for it: it stays in the content
        reasoning, _, content = renderer.parser.split(content, renderer.behaviour.opens_reasoning, THINK)
    calls = [(call.name, call.arguments) for call in parsed.calls]
    return Turn(text, reasoning, content, calls)


def as_turn(text: str, found: list[Any]) -> Turn:
    assert len(found) == 3, found
    reasoning, content, calls = found
    return Turn(text, reasoning or "", content or "", [(name, json.loads(given)) for name, given in calls])


def stripped(turn: Turn) -> Turn:
    return turn._replace(reasoning=turn.reasoning.strip(), content=turn.content.strip())


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in PARSERS], ids=lambda family: family.name)
def test_vllm_reads_what_we_read(family: Family, reader: Reader) -> None:
    renderer = renderer_of(family)
    turns = sampled_turns(family, renderer)
    theirs = reader.read(family, renderer, [(prompt, ids) for prompt, ids, _ in turns])
    rules, needed = DIFFERENCES.get(family.name, []), set()
    for (_, ids, text), found in zip(turns, theirs, strict=True):
        expected = ours = read_by_us(renderer, ids, text)
        for rule in rules:
            expected = rule(expected)
            needed |= {rule} if expected != ours else set()
        assert stripped(as_turn(text, found)) == stripped(expected)
    assert len(turns) >= 30
    assert needed == set(rules), "a difference that is listed was not seen"


def test_every_family_and_difference_is_listed() -> None:
    assert {family.name for family in FAMILIES} == PARSERS.keys() | WITHOUT
    page = (REPOSITORY / "docs" / "tool-call-formats.md").read_text(encoding="utf-8")
    section = page.partition("## What vLLM reads otherwise")[2].partition("\n## ")[0]
    for family, rules in DIFFERENCES.items():
        for rule in rules:
            assert f"`{family}`" in next(line for line in section.splitlines() if f"`{rule.__name__}`" in line)

"""Model families with their chat templates, and a renderer for each; the product itself knows none by name."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from agentfactory.rollout.text.load_renderer import make_renderer
from agentfactory.rollout.text.renderer import Renderer
from tests.chat_tokenizers import SPECIAL, make_tokenizer, trl_template

TEMPLATES = Path(__file__).parent / "rollout" / "model_templates"
_MARK = re.compile(r"<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|\[/?[A-Z_]{3,}\]|<SPECIAL_\d+>|\]~!?b\[?\]?|\[e~\[|<end_of_turn>")
_TAGS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("<start_function_call>", "<end_function_call>", "<start_function_response>", "<end_function_response>"),
    "<escape>",
)

_OF_CALLS = ("tool_call", "tool▁", "DSML", ":opensource>")
_HY3 = ("think", "tool_calls", "tool_call", "arg_key", "arg_value")


@dataclass(frozen=True)
class Family:
    """A template (`trl:NAME` from TRL's package, or our own file), and the format that must be detected for it."""

    models: str
    template: str
    parser: str
    tokens: tuple[str, ...] = ()
    """Tokens of the tokenizer that do not appear in the template."""
    odd: str = ""
    """The reason why only the first turn of its conversations can be parsed back."""

    @property
    def source(self) -> str:
        kind, _, name = self.template.rpartition(":")
        return trl_template(name) if kind else (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")

    @property
    def name(self) -> str:
        return self.template.removeprefix("trl:")


FAMILIES = [
    Family("Qwen2.5", "trl:qwen2_5", "hermes"),
    Family("Qwen3", "trl:qwen3", "hermes"),
    Family("Qwen3-2507", "trl:qwen3_instruct_2507", "hermes"),
    Family("QwQ", "qwq", "hermes"),
    Family("Qwen3-Coder", "qwen3_coder", "qwen3_coder"),
    Family("Qwen3.5", "trl:qwen3_5_think", "qwen3_coder"),
    Family("Qwen3.8", "trl:qwen3_8", "qwen3_coder"),
    Family("Llama 3.1", "trl:llama3_1", "llama3_json", ("<|python_tag|>",)),
    Family("Llama 3.2", "trl:llama3_2", "llama3_json", ("<|python_tag|>",)),
    Family("Llama 4", "llama_4", "llama3_json", ("<|python_tag|>",)),
    Family("Mistral Nemo", "mistral_nemo", "mistral_v3"),
    Family("Mistral Small 3.2", "mistral_small_3_2", "mistral"),
    Family("Ministral 3", "ministral_3", "mistral"),
    Family("DeepSeek V3, R1", "deepseek_v3", "deepseek_v3"),
    Family(
        "DeepSeek V3, R1",
        "trl:deepseekv3",
        "deepseek_v3",
        odd="leaves out the opening token from a conversation's second calls on",
    ),
    Family("DeepSeek V3.1", "deepseek_v3_1", "deepseek_v31"),
    Family("DeepSeek V3.2", "deepseek_v3_2", "deepseek_v32"),
    Family("DeepSeek V4", "deepseek_v4", "deepseek_v4"),
    Family("GLM-4.5", "trl:glm4moe", "glm"),
    Family("GLM-4.6", "glm_4_6", "glm"),
    Family("GLM-4.7", "glm_4_7", "glm"),
    Family("gpt-oss", "trl:gptoss", "harmony"),
    Family("Kimi K2", "kimi_k2", "kimi"),
    Family("MiniMax M2", "minimax_m2", "minimax"),
    Family("FunctionGemma", "functiongemma", "functiongemma"),
    Family("Gemma 4", "trl:gemma4_v5", "gemma4"),
    Family("Phi-4-mini", "phi_4_mini", "phi4", ("<|tool_call|>", "<|/tool_call|>")),
    Family("Granite 3.3", "granite_3_3", "granite"),
    Family("Granite 4", "granite_4", "hermes"),
    Family("Apertus", "apertus", "apertus"),
    Family("Cohere's North", "cohere", "cohere"),
    Family("Functionary 3.1", "functionary_3_1", "functionary"),
    Family("GigaChat 3.1", "gigachat_3_1", "gigachat"),
    Family("Seed-OSS", "seed_oss", "seed_oss", ("<seed:bos>", "<seed:eos>")),
    Family("LFM2", "trl:lfm2", "pythonic", ("<|tool_call_start|>", "<|tool_call_end|>")),
    Family("LFM2.5", "trl:lfm2_2_5_v2", "pythonic"),
    Family("Hunyuan A13B", "hunyuan_a13b", "hunyuan"),
    Family(
        "Hunyuan 3",
        "hy3",
        "hy3",
        (
            *(f"<｜hy_{name}:opensource｜>" for name in ("eos", "User", "Assistant", "begin_of_sentence")),
            *(f"<{slash}{name}:opensource>" for name in _HY3 for slash in ("", "/")),
            "<tool_sep:opensource>",
        ),
    ),
    Family("Nemotron Nano 2", "nemotron_nano_2", "nemotron"),
    Family("Nemotron 3", "trl:nemotron_3_super", "qwen3_coder"),
]
REFUSED = {"Gemma 3": ("trl:gemma3", "ignores `tools`")}
"""Families whose templates support no tool calls, so only a text format remains."""


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the template's tokens; the tokens of calls and reasoning are not special."""
    source = family.source
    found = dict.fromkeys([*SPECIAL.findall(source), *_MARK.findall(source), *family.tokens, "<s>", "</s>"])
    calls = [token for token in found if any(part in token for part in _OF_CALLS)]
    special = tuple(token for token in found if token not in calls and token != "<|channel>" and len(token) > 3)
    added = (*calls, *(tag for tag in _TAGS if tag in source), "<|channel>", "<channel|>")
    eos = next((token for token in ("<｜end▁of▁sentence｜>", "[e~[") if token in special), "</s>")
    tokenizer = make_tokenizer(source, special=special, added=added, eos=eos)
    tokenizer.bos_token = "<s>"
    return tokenizer


@cache
def renderer_of(family: Family, **options: Any) -> Renderer:
    return make_renderer(tokenizer_of(family), **options)


def table() -> str:
    lines = ["| models | template | `rollout.parser` | rows | a turn ends with |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        renderer = renderer_of(family)
        closings = renderer.behaviour.closings
        ends = dict.fromkeys(f"`{c.end}`".replace("|", "\\|") for c in (closings.words, closings.calls))
        origin = "TRL" if family.template.startswith("trl:") else "tests"
        found, choice = renderer.info["parser"], renderer.info["choice"]
        lines.append(f"| {family.models} | {origin}: `{family.name}` | `{found}` | {choice} | {', '.join(ends)} |")
    lines += [
        f"| {models} | TRL: `{template.removeprefix('trl:')}` | refused: {reason} | | |"
        for models, (template, reason) in REFUSED.items()
    ]
    return "\n".join(lines)

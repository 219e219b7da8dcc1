"""Tool-call formats, which parse a model's text into calls and write calls as text."""

from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.loading import load_for
from agentfactory.rollout.text.parsers.parser import Arguments, Call, FormatError, NativeParser, Parser, Reading

__all__ = ["AUTO", "PARSERS", "Arguments", "Call", "FormatError", "NativeParser", "Parser", "Reading", "load_parser"]

AUTO = "auto"
"""`rollout.parser`: the native format that the chat template writes."""
PARSERS = {
    "hermes": "agentfactory.rollout.text.parsers.formats.json_marks:Hermes",
    "qwen3_coder": "agentfactory.rollout.text.parsers.formats.tagged_values:Qwen3Coder",
    "llama3_json": "agentfactory.rollout.text.parsers.formats.llama3_json:Llama3Json",
    "pythonic": "agentfactory.rollout.text.parsers.formats.pythonic:Pythonic",
    "apertus": "agentfactory.rollout.text.parsers.formats.json_marks:Apertus",
    "cohere": "agentfactory.rollout.text.parsers.formats.json_marks:Cohere",
    "deepseek_v3": "agentfactory.rollout.text.parsers.formats.sections:DeepSeekV3",
    "deepseek_v31": "agentfactory.rollout.text.parsers.formats.sections:DeepSeekV31",
    "deepseek_v32": "agentfactory.rollout.text.parsers.formats.tagged_values:DeepSeekV32",
    "deepseek_v4": "agentfactory.rollout.text.parsers.formats.tagged_values:DeepSeekV4",
    "functionary": "agentfactory.rollout.text.parsers.formats.llama3_json:Functionary",
    "functiongemma": "agentfactory.rollout.text.parsers.formats.gemma:FunctionGemma",
    "gemma4": "agentfactory.rollout.text.parsers.formats.gemma:Gemma4",
    "gigachat": "agentfactory.rollout.text.parsers.formats.json_marks:GigaChat",
    "glm": "agentfactory.rollout.text.parsers.formats.tagged_values:Glm",
    "granite": "agentfactory.rollout.text.parsers.formats.json_marks:Granite",
    "harmony": "agentfactory.rollout.text.parsers.formats.harmony:Harmony",
    "hunyuan": "agentfactory.rollout.text.parsers.formats.json_marks:Hunyuan",
    "hy3": "agentfactory.rollout.text.parsers.formats.tagged_values:Hy3",
    "kimi": "agentfactory.rollout.text.parsers.formats.sections:Kimi",
    "minimax": "agentfactory.rollout.text.parsers.formats.tagged_values:MiniMax",
    "mistral": "agentfactory.rollout.text.parsers.formats.json_marks:Mistral",
    "mistral_v3": "agentfactory.rollout.text.parsers.formats.json_marks:MistralV3",
    "nemotron": "agentfactory.rollout.text.parsers.formats.json_marks:Nemotron",
    "phi4": "agentfactory.rollout.text.parsers.formats.json_marks:Phi4",
    "phi4_mini": "agentfactory.rollout.text.parsers.formats.json_marks:Phi4Mini",
    "seed_oss": "agentfactory.rollout.text.parsers.formats.tagged_values:SeedOss",
    "json": "agentfactory.rollout.text.parsers.formats.json_calls:JsonCalls",
    "react": "agentfactory.rollout.text.parsers.formats.react:React",
    "code_block": "agentfactory.rollout.text.parsers.formats.code_block:CodeBlock",
    "tags": "agentfactory.rollout.text.parsers.formats.tags:Tags",
}
"""Name in `rollout.parser` -> `package.module:NAME` of its class."""


def load_parser(reference: str, base: Path = Path()) -> Parser:
    """Load the parser that `rollout.parser` names: one of PARSERS, or a class as `FILE.py:NAME` below `base`."""
    parser = load_for("rollout.parser", reference, base, PARSERS)
    if not (isinstance(parser, type) and issubclass(parser, Parser)):
        raise SettingError("rollout.parser", f"{reference} is no class derived from agentfactory.Parser", "name one")
    return parser()

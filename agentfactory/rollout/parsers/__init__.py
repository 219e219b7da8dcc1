"""Tool-call formats: parse the calls that a model writes in its text, and write calls as text."""

from pathlib import Path

from agentfactory.rollout.parsers.parser import Arguments, Call, FormatError, NativeParser, Parser, Reading
from agentfactory.tools.errors import SettingError
from agentfactory.tools.user_code.loading import UserCodeError, load_object

__all__ = ["AUTO", "PARSERS", "Arguments", "Call", "FormatError", "NativeParser", "Parser", "Reading", "load_parser"]

AUTO = "auto"
"""`rollout.parser`: the native format that the chat template writes."""
PARSERS = {
    "hermes": "agentfactory.rollout.parsers.hermes:Hermes",
    "qwen3_coder": "agentfactory.rollout.parsers.qwen3_coder:Qwen3Coder",
    "llama3_json": "agentfactory.rollout.parsers.llama3_json:Llama3Json",
    "pythonic": "agentfactory.rollout.parsers.pythonic:Pythonic",
    "deepseek_v3": "agentfactory.rollout.parsers.deepseek:DeepSeekV3",
    "deepseek_v31": "agentfactory.rollout.parsers.deepseek:DeepSeekV31",
    "deepseek_v32": "agentfactory.rollout.parsers.invoke:DeepSeekV32",
    "deepseek_v4": "agentfactory.rollout.parsers.invoke:DeepSeekV4",
    "functiongemma": "agentfactory.rollout.parsers.gemma:FunctionGemma",
    "gemma4": "agentfactory.rollout.parsers.gemma:Gemma4",
    "glm": "agentfactory.rollout.parsers.glm:Glm",
    "granite": "agentfactory.rollout.parsers.granite:Granite",
    "harmony": "agentfactory.rollout.parsers.harmony:Harmony",
    "hunyuan": "agentfactory.rollout.parsers.hunyuan:Hunyuan",
    "hy3": "agentfactory.rollout.parsers.hunyuan:Hy3",
    "kimi": "agentfactory.rollout.parsers.kimi:Kimi",
    "minimax": "agentfactory.rollout.parsers.invoke:MiniMax",
    "mistral": "agentfactory.rollout.parsers.mistral:Mistral",
    "mistral_v3": "agentfactory.rollout.parsers.mistral:MistralV3",
    "nemotron": "agentfactory.rollout.parsers.nemotron:Nemotron",
    "phi4": "agentfactory.rollout.parsers.phi4:Phi4",
    "phi4_mini": "agentfactory.rollout.parsers.phi4:Phi4Mini",
    "react": "agentfactory.rollout.parsers.react:React",
    "code_block": "agentfactory.rollout.parsers.code_block:CodeBlock",
    "tags": "agentfactory.rollout.parsers.tags:Tags",
}
"""Name in `rollout.parser` -> `package.module:NAME` of its class."""


def load_parser(reference: str, base: Path = Path()) -> Parser:
    """Load the parser that `rollout.parser` names: one of PARSERS, or `FILE.py:NAME` of a Parser class, the path
    relative to `base`. Raises SettingError if there is none."""
    try:
        parser = load_object(reference, base, PARSERS)
    except UserCodeError as error:
        raise SettingError("rollout.parser", f"unknown: {error.problem}", error.fix) from error
    if not (isinstance(parser, type) and issubclass(parser, Parser)):
        raise SettingError("rollout.parser", f"{reference} is no class derived from agentfactory.Parser", "name one")
    return parser()

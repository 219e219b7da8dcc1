"""Tool-call formats: parse the calls that a model writes in its text, and write calls as text."""

from pathlib import Path

from agentfactory.rollout.parsers.parser import Arguments, Call, FormatError, NativeParser, Parser, Reading
from agentfactory.tools.errors import SettingError
from agentfactory.tools.user_code import UserCodeError, load_object

__all__ = ["PARSERS", "Arguments", "Call", "FormatError", "NativeParser", "Parser", "Reading", "load_parser"]

PARSERS = {
    "hermes": "agentfactory.rollout.parsers.hermes:Hermes",
    "qwen3_coder": "agentfactory.rollout.parsers.qwen3_coder:Qwen3Coder",
    "llama3_json": "agentfactory.rollout.parsers.llama3_json:Llama3Json",
    "pythonic": "agentfactory.rollout.parsers.pythonic:Pythonic",
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

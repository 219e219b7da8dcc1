"""Tokens that a chain's template and tool-call format need: the ones that the policy writes, and the ones that it only
reads."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentfactory.base.errors import SettingError
from agentfactory.rollout.text.template_renderer import TemplateRenderer


@dataclass(frozen=True)
class FormatTokens:
    """Added tokens (special ones and tags such as `<tool_call>`) by text."""

    written: dict[str, int]
    """Tokens of calls, reasoning tags, and tokens that end turns."""
    ends: list[int]
    """The written tokens that end turns: no other tool-call format avoids them."""
    read: dict[str, int] = field(default_factory=dict)
    """Tokens that frame the messages of others."""

    def check(self, rows: int) -> None:
        """Raise SettingError if a token is beyond the `rows` of a network's embedding."""
        beyond = [f"{text} ({number})" for text, number in (self.written | self.read).items() if number >= rows]
        if beyond:
            problem = f"the chat template needs {', '.join(beyond[:5])}, and the network has {rows} tokens"
            fix = "resize its embeddings and save it, or set model.chat_template to a template without them"
            raise SettingError("model.path", problem, fix)

    @classmethod
    def of_info(cls, info: dict[str, Any]) -> "FormatTokens | None":
        """Return the tokens in a renderer's `info`; None in checkpoints of earlier versions."""
        return cls(**info["tokens"]) if "tokens" in info else None


def format_tokens(renderer: TemplateRenderer) -> FormatTokens:
    """Return the tokens that a renderer's template and format need."""
    tokenizer, behaviour = renderer.tokenizer, renderer.behaviour
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    ends = sorted({end for calls in (False, True) if (end := renderer.end_of(calls)) is not None})
    written = {text: number for text, number in added.items() if text in behaviour.turns}
    written |= {str(tokenizer.convert_ids_to_tokens(end)): end for end in ends}
    read = {text: number for text, number in added.items() if text in behaviour.whole_frame + behaviour.frame}
    return FormatTokens(written, ends, {text: number for text, number in read.items() if text not in written})


def pieces_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of an added token's text, written as ordinary tokens."""
    # without its first character, the text is no added token
    parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text[:1], text[1:])]
    return [number for part in parts for number in part]


def token_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Return the id of a token of model.lora.trainable_tokens. Raises SettingError if there is none."""
    found: Any = tokenizer.get_vocab().get(text)
    if found is None:
        known = ", ".join(sorted(tokenizer.get_added_vocab())[:5])
        problem, fix = f"got {text!r}, which is no token of the vocabulary", f"use auto, or tokens such as {known}"
        raise SettingError("model.lora.trainable_tokens", problem, fix)
    return int(found)

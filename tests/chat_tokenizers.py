"""Generated tokenizers and chat templates for the renderer's tests."""

import re
from functools import cache
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TRL_TEMPLATES = Path(transformers.__file__).parent.parent / "trl" / "chat_templates"
SPECIAL = re.compile(r"<[|｜][^<>'\"\s]{1,40}>|<(?:start|end)_of_turn>|<turn\|>")


def trl_template(name: str) -> str:
    """A template of a published model family, as TRL ships it."""
    return (TRL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def _trained(splits: bool, special: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits)
    tokenizer.decoder = decoders.ByteLevel()
    text = 'the user asks.\n\nAn assistant calls a tool: {"name": "move", "arguments": {"to": "north"}}\n'
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 20, trainer)
    return tokenizer.to_str()


def make_tokenizer(
    template: str | None = None,
    *,
    splits: bool = True,
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    added: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    eos: str = "<|im_end|>",
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer. `splits=False` lets tokens span any characters; `added` are not special."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(splits, special)), eos_token=eos, pad_token=special[-1]
    )
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = template
    return tokenizer


TOOLS_IN_SYSTEM = (
    "{%- if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)


def chatml(call: str, said: str = "m.content", before: str = "") -> str:
    """A template that writes each message as the expression `said`, and each call `c` as the statement `call`."""
    return f"""{TOOLS_IN_SYSTEM}{before}
{{%- for m in messages %}}
{{{{- '<|im_start|>' + m.role + '\n' + {said} }}}}
{{%- for c in m.tool_calls or [] %}}
{call}
{{%- endfor %}}
{{{{- '<|im_end|>\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\n' }}}}{{% endif %}}"""


CALL = """{{- '<tool_call>\n{"name": "' + c.function.name }}
{{- '", "arguments": ' + c.function.arguments | tojson + '}\n</tool_call>' }}"""

STRIPS_REASONING = chatml(
    CALL,
    "(m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' and loop.index0 < ns.last else m.content)",
    """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}""",
)
"""Drops `<think>...</think>` from the turns before the last user message."""

MERGES_NEWLINE = """
{%- for t in tools or [] %}{{- t | tojson + '\n' }}{% endfor %}
{%- for m in messages %}
{{- m.role + ': ' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + c.function.name }}
{{- '", "arguments": ' + c.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '\n\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}"""
"""Closes a turn with a newline and no special token, so that tokens span the boundary."""

REORDERS_KEYS = chatml("""{%- set call = {'name': c.function.name, 'arguments': c.function.arguments} %}
{{- '<tool_call>' + call | tojson(sort_keys=true) + '</tool_call>' }}""")
"""Writes the keys of calls and arguments in alphabetical order instead of the sampled order."""

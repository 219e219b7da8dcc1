"""Prepares the quickstart's hunts for a network that acts in plain text (ReAct) under a chat template without tools,
and has a base model's habit: it goes on with an observation of its own.

`agentfactory train recipes/quickstart/quickstart.yaml prepare=tests/learn/text_format.py:prepare`
`sft.rollout.parser=tests/learn/text_format.py:Habit grpo.rollout.parser=react`"""

from collections.abc import Sequence
from pathlib import Path

from own_formats import SIZES, save, write_tasks
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentfactory import Reading
from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers import Call
from agentfactory.rollout.text.parsers.formats.react import React

HERE = Path(__file__).parent
KEEPS, DROPS = HERE / "thinks_and_keeps.jinja", HERE / "thinks_and_drops.jinja"
_THOUGHT = "I remember:\nObservation: none.\n</think>\n\n"
_MADE_UP = "\nObservation: I am told more.\nThought: and on."


class Habit(React):
    """ReAct after a thought that has a line `Observation:`, and with an observation made up after each action."""

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        return super().read(text.removeprefix(_THOUGHT).removesuffix(_MADE_UP), specs)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        return _THOUGHT + super().write(calls, specs) + _MADE_UP

    def write_answer(self, text: str) -> str:
        return _THOUGHT + super().write_answer(text)


def prepare(folder: Path, seed: int) -> None:
    """Write hunts, transcripts, a tokenizer and an untrained network."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    habit = f"{__file__}:Habit"
    tokenizer = write_tasks(folder, seed, KEEPS.read_text(encoding="utf-8"), tokens, eos=tokens[2], parser=habit)
    config = Qwen3Config(
        **SIZES,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        intermediate_size=384,
        num_key_value_heads=2,
        head_dim=32,
    )
    save(Qwen3ForCausalLM, config, folder, seed)

"""Saved chains whose tokens belong to another tokenizer."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentfactory.base.errors import SettingError
from agentfactory.rollout.text.tokenizer import check_saved_chains
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory

WORDS = ["<|end|>", "hello", "there", "the", "answer", "is", "forty", "two", "move", "north"]


def with_words(words: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<|end|>")


def saved(ids: list[int], content: str, calls: tuple[str, ...] = ()) -> Group:
    made = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in calls]
    answer = {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}
    row = Row([1, *ids], [0, *[1] * len(ids)], [0.0] * (1 + len(ids)))
    messages = [{"role": "user", "content": "hello"}, answer]
    return Group("g", {}, [Trajectory("g.0", messages, [row], Outcome.COMPLETED, 1.0)])


def test_the_model_that_played_reads_its_own_chains(tmp_path: Path) -> None:
    same = [saved([3, 4, 5, 6, 7, 0], "the answer is forty two"), saved([8, 9, 0], "", ("move",))]
    check_saved_chains(same, with_words(WORDS), tmp_path)


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    groups = [saved([3, 4, 5, 6, 7, 0], "the answer is forty two"), saved([8, 9, 0], "", ("move",))]
    for other in ([*WORDS[:1], *reversed(WORDS[1:])], WORDS[:5]):
        with pytest.raises(SettingError, match=r"from_trajectories: .* spell the messages of 0 of 2 chains"):
            check_saved_chains(groups, with_words(other), tmp_path)


def test_chains_that_say_too_little_to_tell_are_accepted(tmp_path: Path) -> None:
    check_saved_chains([saved([3, 0], "42"), saved([0], "")], with_words(WORDS), tmp_path)

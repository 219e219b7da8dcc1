"""A model's tokenizer, its end-of-sequence tokens, and its comparison with another model's tokenizer."""

import json
from collections.abc import Iterable
from functools import cache, partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import object_of, text_of
from agentfactory.rollout.model_hub import load_fault
from agentfactory.rollout.text.stop_strings import Decode
from agentfactory.rollout.trajectory import Group, Trajectory


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, without the truncation and padding of its files. Raises ValueError if it has none."""
    try:
        config = cached_file(path, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
        name = json.loads(Path(config).read_text(encoding="utf-8")).get("tokenizer_class") if config else None
        if name in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            loader: Any = PreTrainedTokenizerFast
        else:
            # takes seconds to import, and loads torch
            from transformers import AutoTokenizer as loader
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        problem = f"{path} has no tokenizer that transformers can load: {load_fault(error)}"
        raise SettingError("model.path", problem, "name a model with its tokenizer") from error
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return the function that converts ids to text, with control tokens by name."""
    decode: Any = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    if tokenizer.is_fast:  # without the wrapper, which doubles the time
        decode = tokenizer.backend_tokenizer.decode
    return partial(decode, skip_special_tokens=False)


def stop_ids(path: str) -> list[int]:
    """Return the ids at which servers end a turn, from generation_config.json, or config.json if that is missing."""
    for name in ("generation_config.json", "config.json"):
        if file := cached_file(path, name, _raise_exceptions_for_missing_entries=False):
            config = object_of(json.loads(Path(file).read_text(encoding="utf-8")))
            ids = config.get("eos_token_id")
            if ids is None:
                ids = object_of(config.get("text_config")).get("eos_token_id")
            found = ids if isinstance(ids, list) else [] if ids is None else [ids]
            for number in found:
                if type(number) is not int or not 0 <= number < 2**31:
                    problem = f"{path} has the end of sequence {number!r:.100} in {name}"
                    raise SettingError("model.path", problem, "write ids of its tokens as eos_token_id")
            return found
    return []


_GROUPS = 20
_TELLING = 3
"""Least length of a text that other tokens would hardly spell by chance."""


def tokens_missing(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, teacher: str) -> dict[int, str]:
    """Return the policy's tokens that the tokenizer of `teacher` does not have, such as tags of a family's later
    version. Raise SettingError if an id stands for two different tokens."""
    theirs = {number: token for token, number in other.get_vocab().items()}
    vocabulary = own.get_vocab()
    differing = {number: token for token, number in vocabulary.items() if theirs.get(number, token) != token}
    if differing:
        number = min(differing)
        problem = (
            f"{teacher} has another tokenizer: token {number} is {theirs[number]!r} there and {differing[number]!r} "
            f"in the policy's, as are {len(differing):,} of {len(vocabulary):,} tokens"
        )
        raise SettingError("teacher.model", problem, "name a teacher of the policy's family, with the same tokenizer")
    return {number: token for token, number in vocabulary.items() if number not in theirs}


def spells_its_messages(chain: Trajectory, tokenizer: PreTrainedTokenizerBase) -> bool | None:
    """Return whether the sampled tokens of a chain contain a text or a tool's name of its assistant messages, spaces
    aside, if `tokenizer` reads them; None if it has none that is long enough to tell."""
    turns = [message for message in chain.messages if message["role"] == "assistant"]
    said = [text_of(message.get("content") or "") for message in turns]
    said += [call["function"]["name"] for message in turns for call in message.get("tool_calls") or []]
    wanted = [text for text in ("".join(each.split()) for each in said) if len(text) >= _TELLING]
    sampled = [int(token) for row in chain.rows for token, bit in zip(row.token_ids, row.mask, strict=True) if bit]
    if not sampled or not wanted:
        return None
    if max(sampled) >= len(tokenizer):
        return False
    text = "".join(str(tokenizer.decode(sampled)).split())
    return any(part in text for part in wanted)


def check_saved_chains(groups: Iterable[Group], tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Raise SettingError if the first chains of saved groups were sampled with another tokenizer."""
    chains = [chain for group in islice(groups, _GROUPS) for chain in group.trajectories]
    found = [same for chain in chains if (same := spells_its_messages(chain, tokenizer)) is not None]
    if len(found) > 2 * sum(found):
        problem = f"{path} has the tokens of another tokenizer: with that of model.path, they spell the messages of "
        problem += f"{sum(found)} of {len(found)} chains"
        fix = "train a model with the tokenizer of the one that played"
        raise SettingError("train.from_trajectories", problem, fix)


@cache
def vocabulary_of(model: str) -> float:
    """Return the number of tokens that a model's network knows; infinite if its configuration does not tell."""
    try:
        config = object_of(json.loads(Path(cached_file(model, "config.json") or "").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return inf
    size = object_of(config.get("text_config")).get("vocab_size", config.get("vocab_size"))
    return size if type(size) is int else inf

"""Comparison of tokenizers where one model's ids are read by another: a teacher reads what the policy sampled, and a
policy is trained on saved chains."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import text_of
from agentfactory.rollout.trajectory import Group, Trajectory

_GROUPS = 20
"""Saved groups that are compared."""
_TELLING = 3
"""Least length of a text that other tokens would hardly spell by chance."""


def tokens_missing(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, teacher: str) -> dict[int, str]:
    """Return the policy's tokens that the tokenizer of `teacher` does not have, such as tags that a later version of a
    family added. Raise SettingError if an id stands for two different tokens."""
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
    said: list[str] = []
    for message in chain.messages:
        if message["role"] == "assistant":
            said += [text_of(message.get("content") or "")]
            said += [call["function"]["name"] for call in message.get("tool_calls") or []]
    wanted = ["".join(text.split()) for text in said]
    sampled = [
        int(token) for row in chain.rows for token in np.asarray(row.token_ids)[np.asarray(row.mask, dtype=bool)]
    ]
    if not sampled or not (wanted := [text for text in wanted if len(text) >= _TELLING]):
        return None
    if max(sampled) >= len(tokenizer):
        return False
    text = "".join(str(tokenizer.decode(sampled)).split())
    return any(part in text for part in wanted)


def check_saved_chains(groups: Iterable[Group], tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Raise SettingError if the first chains of saved groups were sampled with another tokenizer: their ids would be
    trained as other tokens."""
    chains = [chain for group in islice(groups, _GROUPS) for chain in group.trajectories]
    found = [same for chain in chains if (same := spells_its_messages(chain, tokenizer)) is not None]
    if len(found) > 2 * sum(found):
        problem = f"{path} has the tokens of another tokenizer: with that of model.path, they spell the messages of "
        problem += f"{sum(found)} of {len(found)} chains"
        raise SettingError(
            "train.from_trajectories", problem, "train a model with the tokenizer of the one that played"
        )

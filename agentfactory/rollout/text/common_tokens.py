"""Comparison of a teacher's tokenizer with the policy's: a teacher reads the ids that the policy sampled."""

from transformers import PreTrainedTokenizerBase

from agentfactory.tools.errors import SettingError


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

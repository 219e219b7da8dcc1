"""Search-R1 (Jin et al., 2025, arXiv:2503.09516): its text format, and its held-out questions."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from agentfactory.rollout.text.parsers.formats.tags import Tags

DATA_SETS = ("nq", "hotpotqa")
"""The data sets used for training; the test split has five more."""


class SearchR1(Tags):
    """The tags of Search-R1. The prompt in the data explains them, so nothing is added to it."""

    def instructions(self, specs: Sequence[Any]) -> None:
        """Return None: the prompt has the instructions."""
        return None

    def form(self, specs: Sequence[Any]) -> str:
        """Describe the format, as Search-R1 answers an invalid action."""
        return (
            "If I want to search, I should put the query between <search> and </search>. If I want to give the final "
            "answer, I should put the answer between <answer> and </answer>. Let me try again."
        )


def held_out(limit: int, prompt: bool = False, path: str = "PeterJinGo/nq_hotpotqa_train") -> Iterator[dict[str, Any]]:
    """Yield the first `limit` questions of each data set in the test split.

    Args:
        limit: Questions of each data set.
        prompt: Put them into Search-R1's prompt, as `messages`.
        path: A data set with Search-R1's columns.
    """
    import datasets

    taken: Counter[str] = Counter()
    for row in datasets.load_dataset(path, split="test", streaming=True):
        name = row["data_source"]
        if name not in DATA_SETS or taken[name] == limit:
            continue
        taken[name] += 1
        task = {"messages": row["prompt"]} if prompt else {"question": row["question"]}
        yield {**task, "golden_answers": list(row["golden_answers"]), "data_source": name}
        if all(taken[each] == limit for each in DATA_SETS):
            return

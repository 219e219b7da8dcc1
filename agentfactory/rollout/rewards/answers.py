"""Rewards for short answers: exact match and F1, as in SQuAD (Rajpurkar et al., 2016, arXiv:1606.05250)."""

import re
import string
from collections import Counter
from typing import Any

from pydantic.dataclasses import dataclass

from agentfactory.rollout.rewards.decorator import reward
from agentfactory.rollout.rewards.text import OPTIONS, Pattern, accepted_answers, extracted

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Normalise text as SQuAD does: lower case, no ASCII punctuation, no articles, single spaces."""
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(prediction: str, answer: str) -> float:
    """Return the harmonic mean of precision and recall of the normalised words; if a text has no words, 1 if both have
    none, otherwise 0."""
    predicted, expected = normalize(prediction).split(), normalize(answer).split()
    if not predicted or not expected:
        return float(predicted == expected)
    common = (Counter(predicted) & Counter(expected)).total()
    # 2pr / (p + r), with precision common / predicted and recall common / expected
    return 2 * common / (len(predicted) + len(expected))


@reward
@dataclass(config=OPTIONS)
class ExactMatch:
    """1 if the normalised prediction is one of the row's normalised answers, else 0; metric `success`."""

    field: str = "answer"
    """Field of the row: a text or number, or a list of accepted ones."""
    extract: Pattern | None = None
    """The part of the prediction to compare, such as `<answer>(.*?)</answer>`: the first group of the last match."""
    extract_answer: Pattern | None = None
    """The part of the field to compare, such as `#### (.*)`."""

    def check(self, row: dict[str, Any]) -> None:
        """Raise ValueError if the row has no answer."""
        accepted_answers(row, self.field, self.extract_answer)

    def __call__(self, prediction: str, **row: Any) -> dict[str, float]:
        found = normalize(extracted(self.extract, prediction))
        hit = float(found in map(normalize, accepted_answers(row, self.field, self.extract_answer)))
        return {"reward": hit, "success": hit}


@reward
@dataclass(config=OPTIONS)
class F1:
    """Word-level F1 of prediction and answer, from 0 to 1; with several answers, the highest."""

    field: str = "answer"
    """As in exact_match."""
    extract: Pattern | None = None
    """As in exact_match."""
    extract_answer: Pattern | None = None
    """As in exact_match."""

    def check(self, row: dict[str, Any]) -> None:
        """Raise ValueError if the row has no answer."""
        accepted_answers(row, self.field, self.extract_answer)

    def __call__(self, prediction: str, **row: Any) -> float:
        found = extracted(self.extract, prediction)
        return max(token_f1(found, answer) for answer in accepted_answers(row, self.field, self.extract_answer))

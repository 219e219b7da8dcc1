"""Rewards for short answers, as in SQuAD (Rajpurkar et al., 2016, arXiv:1606.05250) and benchmarks about images."""

import re
import string
from collections import Counter
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agentfactory.base.user_code.extras import check_extra
from agentfactory.rollout.rewards.reward_spec import reward
from agentfactory.rollout.rewards.text import OPTIONS, Pattern, accepted_answers, field_of, last_match

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Normalise text as SQuAD does: lower case, no ASCII punctuation, no articles, single spaces."""
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(prediction: str, answer: str) -> float:
    """Return the harmonic mean of precision and recall of the normalised words; 1 if neither text has words."""
    predicted, expected = normalize(prediction).split(), normalize(answer).split()
    if not predicted or not expected:
        return float(predicted == expected)
    common = (Counter(predicted) & Counter(expected)).total()
    # 2pr / (p + r), with precision common / predicted and recall common / expected
    return 2 * common / (len(predicted) + len(expected))


@dataclass(config=OPTIONS)
class Answers:
    """The options of rewards that compare a part of the prediction with the row's accepted answers."""

    field: str = "answer"
    """Field of the row: a text or number, or a list of accepted ones."""
    extract: Pattern | None = None
    """The part of the prediction to compare, such as `<answer>(.*?)</answer>`: the first group of the last match."""

    def check(self, row: dict[str, Any]) -> None:
        """Raise ValueError if the row has no valid answer."""
        self._accepted(row)

    def _accepted(self, row: dict[str, Any]) -> Any:
        return accepted_answers(row, self.field)

    def _found(self, prediction: str) -> str:
        return prediction if self.extract is None else last_match(self.extract, prediction) or ""


@dataclass(config=OPTIONS)
class ShortAnswers(Answers):
    """The same with a part of the row's field, such as `#### (.*)`."""

    extract_answer: Pattern | None = None

    def _accepted(self, row: dict[str, Any]) -> Any:
        return accepted_answers(row, self.field, self.extract_answer)


def hit_or_miss(hit: bool) -> dict[str, float]:
    """Return 1 or 0 as the reward and as the metric `success`."""
    return {"reward": float(hit), "success": float(hit)}


@reward
@dataclass(config=OPTIONS)
class ExactMatch(ShortAnswers):
    """1 if the normalised prediction is one of the row's normalised answers, else 0; metric `success`."""

    def __call__(self, prediction: str, **row: Any) -> dict[str, float]:
        return hit_or_miss(normalize(self._found(prediction)) in map(normalize, self._accepted(row)))


@reward
@dataclass(config=OPTIONS)
class F1(ShortAnswers):
    """Word-level F1 of prediction and answer, from 0 to 1; with several answers, the highest."""

    def __call__(self, prediction: str, **row: Any) -> float:
        found = self._found(prediction)
        return max(token_f1(found, answer) for answer in self._accepted(row))


def anls(prediction: str, answers: list[str], threshold: float = 0.5) -> float:
    """Return the normalised Levenshtein similarity to the nearest answer (Biten et al., 2019, arXiv:1905.13648,
    equation 1): 1 - NL if NL < `threshold`, else 0. Ignores case and the amount of whitespace."""
    # of the extra `rewards`, which the other rewards here do not need
    from rapidfuzz.distance import Levenshtein

    nearest = min(Levenshtein.normalized_distance(_plain(prediction), _plain(answer)) for answer in answers)
    return 1 - nearest if nearest < threshold else 0.0


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def relaxed_match(prediction: str, answer: str, tolerance: float = 0.05) -> bool:
    """Return whether a number is within the relative `tolerance`, or a text equal up to case (ChartQA, Masry et al.,
    2022, arXiv:2203.10244, section 5.1). As in ChartQA's code, an answer of 0 counts as text, and 5% as 0.05."""
    said, wanted = _number(prediction), _number(answer)
    if said is not None and wanted:
        return abs(said - wanted) / abs(wanted) <= tolerance
    return prediction.strip().lower() == answer.strip().lower()


def _number(text: str) -> float | None:
    text = text.strip()
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


_LETTER_ALONE = re.compile(r"\(?([A-Za-z])\)?[.:,]?|\(?([A-Za-z])(?:\)|[.:])\s.*", re.DOTALL)
_LETTER_SAID = re.compile(r"\b(?:answer|option|choice)(?:\s+is)?\s*:?\s*\(?([A-Z])\b(?!')")


def chosen(prediction: str, options: dict[str, str] | None = None) -> str | None:
    """Return the letter, in upper case, of the option that a text chooses: it starts with the letter ("B", "(B)",
    "B. red"), equals one of the `options` (letter -> text), or says "the answer is B". None if it chooses none."""
    text = prediction.strip()
    if (alone := _LETTER_ALONE.fullmatch(text)) is not None:
        return str(alone[1] or alone[2]).upper()
    bare = {letter: _plain(option).rstrip(".") for letter, option in (options or {}).items()}
    same = [letter for letter, option in bare.items() if option == _plain(text).rstrip(".")]
    if len(same) == 1:
        return same[0].upper()
    said = _LETTER_SAID.findall(text)
    return said[-1] if said else None


_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_COUNT = re.compile(rf"(?<![\w.])(?:\d+(?:,\d{{3}})*(?:\.\d+)?|{'|'.join(_WORDS)})\b", re.IGNORECASE)


def counted(prediction: str) -> float | None:
    """Return the last number in a text, in digits, or in words up to twenty; None if there is none."""
    found = _COUNT.findall(prediction)
    if not found:
        return None
    last = found[-1].lower()
    return float(_WORDS.index(last) if last in _WORDS else last.replace(",", ""))


@reward
@dataclass(config=OPTIONS)
class Anls(Answers):
    """The similarity to the nearest answer as in DocVQA (ANLS), from 0 to 1; metric `success`: 1 if they are equal."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Normalised distance from which on the reward is 0."""

    @model_validator(mode="after")
    def _can_work(self) -> "Anls":
        check_extra("rewards")
        return self

    def __call__(self, prediction: str, **row: Any) -> dict[str, float]:
        similarity = anls(self._found(prediction), self._accepted(row), self.threshold)
        return {"reward": similarity, "success": float(similarity == 1)}


@reward
@dataclass(config=OPTIONS)
class RelaxedAccuracy(Answers):
    """1 if the prediction matches the answer, numbers within `tolerance`, as in ChartQA, else 0; metric `success`."""

    tolerance: Annotated[float, Field(ge=0)] = 0.05

    def __call__(self, prediction: str, **row: Any) -> dict[str, float]:
        found = self._found(prediction)
        return hit_or_miss(any(relaxed_match(found, answer, self.tolerance) for answer in self._accepted(row)))


@reward
@dataclass(config=OPTIONS)
class MultipleChoice(Answers):
    """1 if the prediction chooses the option whose letter is in the row's field, by its letter or its text, else 0;
    metrics `success` and `chose_none`."""

    options: str | None = None
    """Field of the row with the texts of the options: a list, or letter -> text. Null: only letters count."""

    def check(self, row: dict[str, Any]) -> None:
        right, options = self._accepted(row), self._options(row)
        if options is not None and right not in options:
            raise ValueError(f"needs a letter of {', '.join(options)} in {self.field!r}, not {row[self.field]!r}")

    def __call__(self, prediction: str, **row: Any) -> dict[str, float]:
        letter = chosen(self._found(prediction), self._options(row))
        return {**hit_or_miss(letter == self._accepted(row)), "chose_none": float(letter is None)}

    def _accepted(self, row: dict[str, Any]) -> str:
        letter = str(field_of(row, self.field)).strip().strip("().").upper()
        if not re.fullmatch("[A-Z]", letter):
            raise ValueError(f"needs a letter in the field {self.field!r}, not {row[self.field]!r}")
        return letter

    def _options(self, row: dict[str, Any]) -> dict[str, str] | None:
        if self.options is None:
            return None
        given = field_of(row, self.options)
        if isinstance(given, dict):
            return {str(letter).upper(): str(text) for letter, text in given.items() if text is not None}
        if not isinstance(given, list):
            raise ValueError(f"needs a list or a mapping in the field {self.options!r}, not {given!r}")
        return {chr(ord("A") + number): str(text) for number, text in enumerate(given)}


@reward
@dataclass(config=OPTIONS)
class Count(Answers):
    """1 if the last number of the prediction, in digits or in words up to twenty, is that of the row's field, else 0;
    metric `success`."""

    def __call__(self, prediction: str, **row: Any) -> dict[str, float]:
        return hit_or_miss(counted(self._found(prediction)) == self._accepted(row))

    def _accepted(self, row: dict[str, Any]) -> float:
        given = field_of(row, self.field)
        try:
            return float(given)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"needs a number in the field {self.field!r}, not {given!r}") from error

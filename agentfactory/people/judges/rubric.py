"""A reward by rubric: a judge's scores on weighted criteria, of the whole chain or of each turn."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from math import inf
from statistics import fmean, median
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic.dataclasses import dataclass

from agentfactory.people.judges.client import VerdictError
from agentfactory.people.judges.frames import draw_nonce, frame
from agentfactory.people.judges.panel import Panel
from agentfactory.rollout.rewards.reward_spec import RewardError, reward
from agentfactory.rollout.rewards.text import OPTIONS
from agentfactory.rollout.trajectory import Trajectory

MOST_CRITERIA = 50
_ANSWERS = {"yes": 1.0, "true": 1.0, "1": 1.0, "no": 0.0, "false": 0.0, "0": 0.0}


@dataclass(config=OPTIONS)
class Criterion:
    """A criterion of a rubric: yes or no, or on a scale."""

    text: Annotated[str, Field(min_length=1)]
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Negative for what a chain should not do."""
    scale: tuple[float, float] | None = None
    """Worst and best score; yes (1) or no (0) without it."""
    name: str = ""
    """Name of its metric; `criterion_N` without it."""

    def __post_init__(self) -> None:
        if self.scale is not None and not 0 < abs(self.scale[0] - self.scale[1]) < inf:
            raise ValueError(
                f"the scale goes from {self.scale[0]:g} to {self.scale[1]:g}; write two numbers that differ"
            )

    @property
    def form(self) -> str:
        return "yes or no" if self.scale is None else f"a number from {self.scale[0]:g} to {self.scale[1]:g}"

    def score(self, given: Any) -> float:
        """Return the score that a judge has `given`, scaled to 0 to 1. Raise VerdictError if it is not valid."""
        text = (given if isinstance(given, str) else json.dumps(given)).strip(" *_`\"'.!").lower()
        worst, best = self.scale or (0.0, 1.0)
        if self.scale is None:
            number = _ANSWERS.get(text)
        else:
            number = float(text) if re.fullmatch(r"-?\d{1,9}(\.\d{1,9})?", text) else None
        if number is None or not min(worst, best) <= number <= max(worst, best):
            raise VerdictError(f"the judge gave {text[:100]!r} on {self.text[:100]!r}, which is not {self.form}")
        return (number - worst) / (best - worst)


_CRITERIA = TypeAdapter(list[Criterion])


def criteria_of(given: Any) -> list[Criterion]:
    """Return a rubric: a list of texts and of objects with `text`, `weight`, `scale` and `name`, or the same as JSON,
    or one text. Raise ValueError."""
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is no JSON: {error}") from None
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not 0 < len(given) <= MOST_CRITERIA:
        raise ValueError(f"got {given!r:.100}, and it must be a list of 1 to {MOST_CRITERIA} criteria")
    try:
        found = _CRITERIA.validate_python([{"text": one} if isinstance(one, str) else one for one in given])
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if not any(one.weight > 0.0 for one in found):
        raise ValueError("no criterion has a positive weight")
    return found


def _total(rubric: Sequence[Criterion], value: Any) -> tuple[float, list[float]]:
    """Return the weighted mean of a judge's scores, and the scores. Raise VerdictError."""
    numbers = [str(number) for number in range(1, len(rubric) + 1)]
    if not isinstance(value, dict) or {*value} != {*numbers}:
        raise VerdictError(f"the judge scored {value!r:.200}, and the criteria are {', '.join(numbers)}")
    scores = [one.score(value[number]) for one, number in zip(rubric, numbers, strict=True)]
    weighted = sum(one.weight * score for one, score in zip(rubric, scores, strict=True))
    return weighted / sum(max(one.weight, 0.0) for one in rubric), scores


@reward
@dataclass(config=OPTIONS, kw_only=True)
class Rubric(Panel):
    """The weighted sum of a judge's scores on criteria, each from 0 to 1, divided by the sum of positive weights."""

    criteria: list[Any] = field(default_factory=list)
    """Texts, or objects with `text`, `weight`, `scale` and `name`."""
    criteria_field: str | None = None
    """Field of the row with criteria that replace these."""
    by_turn: bool = False
    """Score each assistant turn, as its turn reward; the reward for the whole chain is then 0."""

    @field_validator("criteria")
    @classmethod
    def _are_criteria(cls, criteria: list[Any]) -> list[Criterion]:
        return criteria_of(criteria) if criteria else []

    @model_validator(mode="after")
    def _has_criteria(self) -> "Rubric":
        if not self.criteria and self.criteria_field is None:
            raise ValueError("there is no rubric; set criteria, or criteria_field to a field of the row")
        if self.by_turn and self.show == "prediction":
            raise ValueError("by_turn scores the turns of the conversation; remove show: prediction")
        return self

    def rubric_of(self, row: Mapping[str, Any]) -> list[Criterion]:
        """Return the row's criteria, or else the recipe's. Raise ValueError."""
        given = None if self.criteria_field is None else row.get(self.criteria_field)
        if not given and self.criteria:
            return self.criteria
        if not given:
            raise ValueError(f"finds no rubric in the field {self.criteria_field!r} ({', '.join(row)}) nor in criteria")
        try:
            return criteria_of(given)
        except ValueError as error:
            raise ValueError(f"cannot use the rubric in the field {self.criteria_field!r}: {error}") from None

    def check(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError if the row lacks a field of `context`, or has no usable rubric."""
        super().check(row)
        self.rubric_of(row)

    async def __call__(self, trajectory: Trajectory, **row: Any) -> dict[str, Any]:
        rubric, nonce, turns = self.rubric_of(row), draw_nonce(), trajectory.turns
        if self.by_turn and not turns:
            return {"reward": 0.0, "turn_rewards": []}
        if self.by_turn and sum(message["role"] == "assistant" for message in trajectory.messages) < turns:
            raise RewardError("the chain's messages lack some of its turns, so that they cannot be scored one by one")
        listed = "\n".join(f"{number}. {one.text} ({one.form})" for number, one in enumerate(rubric, 1))
        what = f"each of the {turns} turns" if self.by_turn else "the answer"
        parts = (frame("criteria", listed, nonce), self.context_of(row, nonce), self.shown(trajectory, nonce))
        question = "\n\n".join((f"Score {what} on these criteria.", *filter(None, parts)))
        form = f"{{{', '.join(f'{json.dumps(str(number))}: {one.form}' for number, one in enumerate(rubric, 1))}}}"
        form = f"[{form}, ... one such object for each of the {turns} turns]" if self.by_turn else form

        def read(value: Any) -> list[tuple[float, list[float]]]:
            scored = value if self.by_turn else [value]
            if not isinstance(scored, list) or len(scored) != (turns if self.by_turn else 1):
                raise VerdictError(f"the judge scored {value!r:.200}, which is no list for {turns} turns")
            return [_total(rubric, one) for one in scored]

        found = await self.consult(question, form, nonce, read)
        # for each turn, or for the chain, what each judge gave
        columns = [*zip(*(verdict for verdict, _ in found), strict=True)]
        rewards = [median(total for total, _ in column) for column in columns]
        figures = {"judges": float(len(found)), "cached": fmean(cached for _, cached in found)}
        figures["spread"] = max(max(column)[0] - min(column)[0] for column in columns)
        if self.by_turn:
            return {"reward": 0.0, "turn_rewards": rewards, **self.metrics(figures)}
        if rubric is self.criteria:
            scores = zip(*(scores for _, scores in columns[0]), strict=True)
            names = (one.name or f"criterion_{number}" for number, one in enumerate(rubric, 1))
            figures |= {name: median(given) for name, given in zip(names, scores, strict=True)}
        return {"reward": rewards[0], **self.metrics(figures)}

"""Labelled texts, and the agreement of a judge with their labels."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import is_finite_number
from agentfactory.people.judges.client import Asking
from agentfactory.people.judges.exploits import PartialCorrelation, written
from agentfactory.people.judges.judge import Judge
from agentfactory.people.judges.pairwise import Pairwise, bias_of
from agentfactory.people.judges.rubric import Rubric
from agentfactory.rollout.data.conversations import Findings, clean_messages
from agentfactory.rollout.data.files import RowFile
from agentfactory.rollout.rewards.reward_spec import RewardError, RewardSpec
from agentfactory.rollout.trajectory import Outcome, Trajectory

_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_PLACES = {"first": 1.0, "0": 1.0, "second": 0.0, "1": 0.0, "tie": 0.5}
"""Label of a pair, also as the index of the better text -> the result of the first."""
_MOST_LEVELS = 100


@dataclass(frozen=True)
class Labelled:
    """A labelled text, or pair of texts, as chains; `fields` are those of the row. `label` is a number; of a pair, the
    result of its first text."""

    place: str
    label: float
    chains: list[Trajectory]
    fields: dict[str, Any]

    @property
    def is_pair(self) -> bool:
        return len(self.chains) == 2


def read_labels(file: Path) -> list[Labelled]:
    """Read labelled texts. Raise SettingError with the line of one that cannot be used."""
    if not file.is_file():
        raise SettingError("LABELS", f"there is no file {file}", "write a line of JSON for each labelled text")
    return [_labelled(place, row) for place, row in RowFile(file)]


def _labelled(place: str, row: Any) -> Labelled:
    fix = 'write {"prediction": TEXT, "label": 1}, `messages`, or {"predictions": [TEXT, TEXT], "label": "first"}'
    if not isinstance(row, dict) or "label" not in row:
        raise SettingError("LABELS", f"{place} has no label", fix)
    fields = dict(row)
    given, texts = fields.pop("label"), fields.pop("predictions", None)
    prediction, messages = fields.pop("prediction", None), fields.pop("messages", None)
    opening = [{"role": "user", "content": str(row["question"])}] if "question" in row else []
    pair = texts is not None
    texts = texts if pair or prediction is None else [prediction]
    if texts is None and messages is not None:
        try:
            said = [clean_messages(messages, {}, Findings())]
        except ValueError as error:
            raise SettingError("LABELS", f"{place}: {error}", "correct it") from None
    elif isinstance(texts, list) and len(texts) == 1 + pair and all(isinstance(text, str) for text in texts):
        said = [[*opening, {"role": "assistant", "content": text}] for text in texts]
    else:
        raise SettingError("LABELS", f"{place} has no text to judge", fix)
    text = str(given).strip().lower()
    label: Any = _PLACES.get(text) if pair else _WORDS.get(text, given)
    if not is_finite_number(label):
        kinds = "first, second or tie" if pair else "a number, yes or no"
        raise SettingError("LABELS", f"{place} has the label {given!r:.100}", f"write {kinds}")
    chains = [
        Trajectory(place, one, [], Outcome.COMPLETED, turns=sum(part["role"] == "assistant" for part in one))
        for one in said
    ]
    return Labelled(place, float(label), chains, fields)


def scale_of(judge: Asking) -> tuple[float, float]:
    """Return the labels that mean the rewards 0 and 1: the ends of the judge's scale, if it has only one."""
    if isinstance(judge, Judge):
        return judge.worst, judge.best
    scales = [one.scale for one in judge.criteria] if isinstance(judge, Rubric) else []
    return scales[0] if len(scales) == 1 and scales[0] is not None else (0.0, 1.0)


async def agreement(
    spec: RewardSpec, labelled: Sequence[Labelled], given: Sequence[float] | None = None
) -> dict[str, Any]:
    """Ask the judge of a reward about texts of its kind; return its agreement with the labels, and its biases. Raise
    SettingError if a label is not on its scale, which `given` sets."""
    judge: Any = spec.function
    pairs = isinstance(judge, Pairwise)
    ours = [one for one in labelled if one.is_pair is pairs]
    worst, best = scale = (0.0, 1.0) if pairs else tuple(given or scale_of(judge))
    if not 0 < abs(best - worst) < inf:
        raise SettingError("--scale", f"got {worst:g} {best:g}", "write two numbers that differ")
    for one in ours:
        if not min(scale) <= one.label <= max(scale):
            problem = f"{one.place} has the label {one.label:g}, and {spec.label} ({spec.name}) goes from {worst:g} to "
            raise SettingError("--scale", f"{problem}{best:g}", "give the labels that mean the rewards 0 and 1")
    places = asyncio.Semaphore(judge.concurrency)  # so that no wait counts towards the time limit

    async def ask(one: Labelled) -> Any:
        try:
            async with places, asyncio.timeout(spec.timeout_seconds):
                judge.check(one.fields)
                if pairs:
                    return await judge.compare(*one.chains, one.fields)
                found = spec.parse(await spec.ask({"trajectory": one.chains[0]}, one.fields), one.chains[0])
        except (RewardError, TypeError, ValueError, TimeoutError) as error:
            return RewardError(f"{one.place}: {str(error) or f'it took longer than {spec.limit}'}")
        return worst + (fmean(found.turn_rewards) if found.turn_rewards else found.reward) * (best - worst)

    try:
        verdicts = await asyncio.gather(*map(ask, ours))
    finally:
        await judge.close()
    errors = [str(one) for one in verdicts if isinstance(one, RewardError)]
    kept = [(one, verdict) for one, verdict in zip(ours, verdicts, strict=True) if not isinstance(verdict, RewardError)]
    scores = [verdict.result if pairs else verdict for _, verdict in kept]
    labels = [one.label for one, _ in kept]
    # the steps of the scale, if labels are whole, and those that people used
    whole = all(label == int(label) for label in labels) and max(scale) - min(scale) <= _MOST_LEVELS
    steps = [0.5] if pairs else range(int(min(scale)), int(max(scale)) + 1) if whole else []
    levels = sorted({*labels, *scale, *steps})
    rounded = [min(levels, key=lambda level: abs(level - score)) for score in scores]
    found: dict[str, Any] = {"judge": spec.name, "label": spec.label, "model": judge.model}
    found |= {"texts": len(ours), "failed": len(errors)}
    found["kappa"] = kappa(labels, rounded, weighted=len(levels) > 2 and not pairs)
    found["agreement"] = fmean(a == b for a, b in zip(labels, rounded, strict=True)) if labels else None
    if pairs:
        found |= bias_of([verdict for _, verdict in kept])
    else:
        related = PartialCorrelation()
        lengths = [float(len(written(one.chains[0]))) for one, _ in kept]
        related.add(lengths, [score - label for score, label in zip(scores, labels, strict=True)])
        found["length_bias"] = related.value if related.freedom else None
    return found | {"requests": judge.sent, "cached": judge.found, "errors": errors[:5]}


def kappa(ones: Sequence[float], others: Sequence[float], weighted: bool) -> float | None:
    """Return Cohen's kappa of two raters, with quadratic weights if `weighted`; None if it is not defined, because both
    gave everything the same."""

    def disagree(one: float, other: float) -> float:
        return (one - other) ** 2 if weighted else float(one != other)

    seen = sum(disagree(one, other) for one, other in zip(ones, others, strict=True))
    first, second = Counter(ones), Counter(others)
    chance = sum(disagree(a, b) * m * n for a, m in first.items() for b, n in second.items())
    return 1.0 - seen * len(ones) / chance if chance else None


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the agreement of a judge as text."""

    def shown(name: str) -> str:
        return "undefined" if found[name] is None else f"{found[name]:.2f}"

    head = f"{found['label']} ({found['judge']}, {found['model']}): {found['texts']} texts, {found['failed']} failed"
    told = [head, f"  kappa {shown('kappa')}, equal {shown('agreement')}"]
    if "length_bias" in found:
        told.append(f"  rank correlation of score minus label with length: {shown('length_bias')}")
    else:
        told.append(f"  bias to the first place {shown('position_bias')}, orders disagree {shown('disagreement')}")
    told.append(f"  {found['requests']} requests, {found['cached']} answers from the cache")
    return [*told, *(f"  {error}" for error in found["errors"])]

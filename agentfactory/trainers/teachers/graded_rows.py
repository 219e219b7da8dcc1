"""Training rows with a teacher's log-probabilities, as the streams `teacher` or `teacher_top`: from a server, or with
more in the teacher's context than the policy has (teacher.context, see Row.teacher_prompt). Tokens of rows without
grades have an infinite `teacher`, or a `teacher_top` of -1; their divergence and its gradient are 0. NaN is no such
mark: it must reach the gradient, where the learner refuses it."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from agentfactory.base.errors import SettingError
from agentfactory.base.run_notices import notify
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Group
from agentfactory.trainers.batches.batch import TrainingRow
from agentfactory.trainers.config import TeacherConfig

logger = logging.getLogger(__name__)


def without_long(rows: Iterable[TrainingRow], longest: int) -> list[TrainingRow]:
    """Return `rows`, of which none is graded if the teacher's has more than `longest` tokens; warn about these."""
    found, left_out = [], 0
    for row in rows:
        if row.in_context is not None and len(row.in_context.token_ids) > longest:
            row, left_out = replace(row, in_context=None), left_out + 1
        found.append(row)
    if found and not any(row.in_context is not None for row in found):
        text = "the teacher graded no row of a step: no chain had a text for its context (see teacher.context)"
        notify(logger, "nothing graded", text)
    if left_out:
        text = f"{left_out} of {len(found)} rows of a step have more than {longest:,} tokens with teacher.context, "
        text += "and are not graded; raise train.token_budget if the model can take longer rows"
        notify(logger, "rows too long for the teacher", text)
    return found


def check_saved_prompts(groups: Iterable[Group], path: Path) -> None:
    """Raise SettingError if no row of saved groups has a prompt for the teacher: none could be graded."""
    rows = (row for group in groups for chain in group.trajectories for row in chain.rows)
    if all(row.teacher_prompt is None for row in rows):
        problem = f"set, but {path} has no text for a teacher, which a run with teacher.context saves"
        raise SettingError("teacher.context", problem, "name the trajectories/ of such a run, or use teacher.model")


def teachers_rows(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Return the teacher's rows of `rows`; if none is graded, a row whose scores nothing uses: only rank 0 has the
    rows, and all processes must make the same passes."""
    found = [row.in_context for row in rows if row.in_context is not None]
    return found or [replace(row, streams={"weight": np.ones(len(row.targets))}) for row in rows[:1]]


def with_scores(
    rows: Sequence[TrainingRow], scored: Sequence[TrainingRow], stream: str, top_k: int | None
) -> list[TrainingRow]:
    """Return `rows` with the `stream` of the teacher's rows, `scored`."""
    remaining = iter(scored)
    found = []
    for row in rows:
        if row.in_context is not None:
            values = next(remaining).streams[stream]
        elif top_k is None:
            values = np.full(len(row.targets), np.inf)
        else:
            values = np.tile([[[-1.0], [0.0]]], (len(row.targets), 1, top_k))
        found.append(replace(row, streams=row.streams | {stream: values}))
    return found


def is_graded(streams: dict[str, Tensor]) -> Bool[Tensor, "targets"]:
    if (top := streams.get("teacher_top")) is not None:
        return (top[:, 0] >= 0).any(-1)
    if (scores := streams.get("teacher")) is not None:
        return scores != torch.inf
    # an exact divergence covers all
    return torch.ones_like(streams["weight"], dtype=torch.bool)


def with_grades(training: TrainingRow, row: Row, config: TeacherConfig) -> TrainingRow:
    """Add the grades of `row`, which the rollout worker got from the teacher's server, to its training row, as the
    stream `config.stream`. Raise SettingError if it has none, or others."""
    name, count = config.stream, len(training.targets)
    assert name is not None
    grades = row.teacher_logprobs
    lacks = grades is None or len(grades) != count * (config.top_k or 1)
    if lacks or (row.teacher_tokens is None) != config.is_sampled:
        problem = f"a row of {count} sampled tokens has no grades of the server at {config.url}, or others"
        raise SettingError("teacher.url", problem, "begin another run with output=OTHER")
    values = np.asarray(grades, dtype=np.float64)
    if row.teacher_tokens is not None:
        values = np.stack([np.asarray(row.teacher_tokens, np.float64), values]).reshape(2, count, -1).transpose(1, 0, 2)
    return replace(training, streams=training.streams | {name: values})

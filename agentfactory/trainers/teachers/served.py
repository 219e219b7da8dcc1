"""The grades of a teacher behind a server, as streams of training rows."""

from dataclasses import replace

import numpy as np

from agentfactory.base.errors import SettingError
from agentfactory.rollout.token_row import Row
from agentfactory.trainers.batches.batch import TrainingRow
from agentfactory.trainers.config import TeacherConfig


def with_grades(training: TrainingRow, row: Row, config: TeacherConfig) -> TrainingRow:
    """Add the grades of `row`, which the rollout worker got from the teacher's server, to its training row, as the
    stream `config.stream`. Raise SettingError if it has none, or others."""
    name, count = config.stream, len(training.targets)
    assert name is not None
    grades = row.teacher_logprobs
    if (
        grades is None
        or len(grades) != count * (config.top_k or 1)
        or (row.teacher_tokens is None) != config.is_sampled
    ):
        problem = f"a row of {count} sampled tokens has no grades of the server at {config.url}, or others"
        raise SettingError("teacher.url", problem, "begin another run with output=OTHER")
    values = np.asarray(grades, dtype=np.float64)
    if row.teacher_tokens is not None:
        values = np.stack([np.asarray(row.teacher_tokens, np.float64), values]).reshape(2, count, -1).transpose(1, 0, 2)
    return replace(training, streams=training.streams | {name: values})

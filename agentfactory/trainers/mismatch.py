"""What trainer and server disagree about, by the age of the tokens and by what they are there for."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from agentfactory.rollout.roles import ROLES
from agentfactory.rollout.trajectory import Row
from agentfactory.trainers.batch import TrainingRow


def mismatch_by_kind(
    rows: Sequence[TrainingRow],
    sources: Sequence[Row],
    proximal: Sequence[Sequence[float]],
    age: Callable[[str], int] | None = None,
) -> dict[str, float]:
    """Means of |trainer - server| log-probability in nats, over the tokens of each role (`mismatch/format`, ...) and of
    each age in versions (`mismatch/age/2`, ...).

    `sources` are the rollout's rows that `rows` were made of, `proximal` the trainer's log-probabilities of their
    targets; `age` tells how old the weights are that have a label, and without it there are no ages. A drift of the
    format shows in `mismatch/format` long before it is sampled: there the policy was all but certain.
    """
    gaps: dict[str, list[np.ndarray]] = defaultdict(list)
    for row, source, scored in zip(rows, sources, proximal, strict=True):
        gap = np.abs(np.asarray(scored) - np.asarray(row.streams["behaviour"]))
        letters = source.roles.ljust(len(row.token_ids))
        roles = np.array([letters[target] for target in row.targets])
        for name, letter in ROLES.items():
            gaps[f"mismatch/{name}"].append(gap[roles == letter])
        if age is not None:
            targets = np.asarray(row.targets)
            for span in source.versions:
                within = (targets >= span.start) & (targets < span.end)
                gaps[f"mismatch/age/{age(span.version)}"].append(gap[within])
    joined = {name: np.concatenate(parts) for name, parts in gaps.items()}
    return {name: float(values.mean()) for name, values in sorted(joined.items()) if values.size}

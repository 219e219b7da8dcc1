"""The mismatch by role and by age, compared with hand-computed values."""

import pytest

from agentfactory.rollout.token_row import Row, Span
from agentfactory.trainers.batches.batch import training_row
from agentfactory.trainers.update.mismatch import mismatch_by_kind


def row_of(roles: str) -> Row:
    row = Row()
    row.append_context([1, 2])
    row.append_sampled([3, 4], [-1.0, -2.0], [Span("v1", 0, 1), Span("v2", 1, 2)])
    row.note_roles(roles[:2])
    row.append_context([5])
    row.append_sampled([6], [-3.0], [Span("v2", 0, 1)])
    row.note_roles(roles[2:])
    row.append_context([7])
    return row


def test_by_role_and_by_age() -> None:
    row = row_of("fat")
    assert row.roles == "..fa.t"
    trained = training_row(row)
    ages = {"v1": 2, "v2": 0}
    found = mismatch_by_kind([trained], [row], [[-1.5, -2.25, -2.0]], ages.__getitem__)
    ages_by_hand = {"mismatch/age/2": 0.5, "mismatch/age/0": (0.25 + 1.0) / 2}
    roles = {"mismatch/format": 0.5, "mismatch/arguments": 0.25, "mismatch/text": 1.0}
    assert found == pytest.approx(roles | ages_by_hand)
    # mean over all rows' tokens, not over row means
    other = row_of("fff")
    found = mismatch_by_kind([trained, training_row(other)], [row, other], [[-1.5, -2.25, -2.0], [-1.0, -2.0, -3.0]])
    assert found == pytest.approx(roles | {"mismatch/format": 0.5 / 4})

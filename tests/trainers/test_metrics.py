"""Metrics computed from groups, and the mismatch by role and by age, compared with hand-computed values."""

from collections import Counter

import pytest

from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Outcome
from agentfactory.trainers.batches.batch import training_row
from agentfactory.trainers.metrics import bounds_of_success, group_metrics
from agentfactory.trainers.update.policy_update import mismatch_by_kind
from tests.trainers.conftest import make_groups


def test_group_metrics_by_hand() -> None:
    groups = make_groups(2, 2)
    chains = [chain for group in groups for chain in group.trajectories]
    for chain, reward, success in zip(chains, [1.0, 3.0, 2.0, None], [1.0, 0.0, 1.0, 1.0], strict=True):
        chain.reward, chain.metrics, chain.turns = reward, {"success": success}, 4
    del chains[3].metrics["success"]
    chains[3].outcome = Outcome.TIMEOUT
    metrics = group_metrics(groups, ages=Counter({4: 3, 0: 1}))
    assert metrics == pytest.approx(
        {
            "reward": 2.0,
            "reward_std": (2 / 3) ** 0.5,
            "success": 2 / 3,
            "turns": 4.0,
            "groups/equal_rewards": 0.5,  # in the second group, only one chain has a reward
            "outcome/completed": 0.75,
            "outcome/timeout": 0.25,
            "staleness/mean": 3.0,
            "staleness/max": 4,
            "staleness/recomputed": 0.0,
        }
    )
    assert "staleness/mean" not in group_metrics(groups, Counter())


def test_what_new_weights_make_servers_compute_again() -> None:
    """Within a turn and between two turns: everything before the change, once per change."""
    (group,) = make_groups(1, 2)
    changed, kept = (chain.rows for chain in group.trajectories)
    within = [Span("v0", 10, 14), Span("v1", 14, 20)]
    between = [Span("v1", 26, 30), Span("v2", 40, 44)]
    changed[:] = [Row(token_ids=[1] * 50, versions=[*within, *between])]
    kept[:] = [Row(token_ids=[1] * 50, versions=[Span("v0", 10, 20), Span("v1", 20, 30, mixed=True)])]
    assert group_metrics([group], Counter({0: 1}))["staleness/recomputed"] == (14 + 30) / 100


def test_bounds_of_the_success_of_started_chains() -> None:
    """Of 100 started chains 96 ended, and a quarter of these succeeded: 24 to 28 of 100."""
    found = bounds_of_success({"success": 0.25, "chains": 96.0, "cancelled/chains": 4.0})
    assert found == {"started/success_least": pytest.approx(0.24), "started/success_most": pytest.approx(0.28)}
    assert bounds_of_success({"success": 0.25, "chains": 96.0, "cancelled/chains": 0.0}) == {}
    assert bounds_of_success({"chains": 96.0, "cancelled/chains": 4.0}) == {}


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


def test_mismatch_by_role_and_by_age() -> None:
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

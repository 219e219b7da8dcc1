"""Admission: how far generation may run ahead."""

import pytest

from rollout.scheduler import Admission


def start_all(admission: Admission) -> int:
    before = admission.started
    while admission.may_start():
        admission.start()
    return admission.started - before


def test_staleness_zero_alternates_generation_and_training() -> None:
    admission = Admission(batch_size=4, max_staleness=0, total=12)
    assert start_all(admission) == 4
    admission.publish(1)
    assert start_all(admission) == 4
    admission.publish(2)
    assert start_all(admission) == 4
    admission.publish(3)
    assert start_all(admission) == 0, "no group is started that nobody will train"


@pytest.mark.parametrize("k", [1, 2, 4])
def test_generation_runs_k_batches_ahead(k: int) -> None:
    admission = Admission(batch_size=3, max_staleness=k, total=1000)
    assert start_all(admission) == (k + 1) * 3
    admission.publish(1)
    assert start_all(admission) == 3


def test_a_dropped_group_is_replaced() -> None:
    admission = Admission(batch_size=2, max_staleness=0, total=2)
    start_all(admission)
    admission.dropped()
    assert start_all(admission) == 1


def test_misuse_is_an_error() -> None:
    admission = Admission(batch_size=1, max_staleness=0, total=5)
    admission.start()
    with pytest.raises(ValueError, match="may not start"):
        admission.start()
    admission.publish(1)
    with pytest.raises(ValueError, match="must rise"):
        admission.publish(1)

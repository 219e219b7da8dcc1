"""Group advantages against TRL's convention and by hand."""

import pytest
import torch
from trl.trainer.utils import nanstd

from trainers.advantages import group_advantages


def test_hand_worked() -> None:
    # mean 2, sample variance (1 + 0 + 1) / 2 = 1
    assert group_advantages([1.0, 2.0, 3.0]) == pytest.approx([-1 / 1.0001, 0.0, 1 / 1.0001])
    assert group_advantages([1.0, 2.0, 3.0], scale=False) == pytest.approx([-1.0, 0.0, 1.0])


def test_equals_trl_with_unscorable_members() -> None:
    rewards = [0.3, None, 0.9, 0.1, None, 0.35]
    known = torch.tensor([float("nan") if r is None else r for r in rewards], dtype=torch.float64)
    trl = torch.nan_to_num((known - known.nanmean()) / (nanstd(known, dim=0) + 1e-4), nan=0.0)
    assert group_advantages(rewards) == pytest.approx(trl.tolist(), abs=1e-7)  # TRL corrects in float32


def test_rewards_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match=r"finite numbers, not \[inf, 0.0\]"):
        group_advantages([float("inf"), 0.0])


@pytest.mark.parametrize("rewards", [[0.1] * 7, [None, 0.7], [0.5], [None, None]])
def test_nothing_to_compare_is_exactly_zero(rewards: list[float | None]) -> None:
    assert group_advantages(rewards) == [0.0] * len(rewards)

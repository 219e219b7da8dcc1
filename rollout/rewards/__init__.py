"""Rewards: `@reward` functions and classes of the user's own, and a small library of prebuilt ones."""

from rollout.rewards.decorator import reward
from rollout.rewards.entry import PREBUILT, InvalidReward, RewardError
from rollout.rewards.scoring import Rewards, prediction_of

__all__ = ["PREBUILT", "InvalidReward", "RewardError", "Rewards", "prediction_of", "reward"]

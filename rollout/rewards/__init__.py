"""Rewards: `@reward` functions and classes of the user's own, and a small library of prebuilt ones."""

from rollout.rewards.decorator import reward
from rollout.rewards.scoring import PREBUILT, InvalidReward, RewardError, Rewards, prediction_of

__all__ = ["PREBUILT", "InvalidReward", "RewardError", "Rewards", "prediction_of", "reward"]

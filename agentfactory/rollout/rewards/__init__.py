"""Rewards: users' `@reward` functions and classes, and a small library of prebuilt ones."""

from agentfactory.rollout.rewards.reward_spec import PREBUILT, RewardError, reward
from agentfactory.rollout.rewards.scoring import Rewards, prediction_of

__all__ = ["PREBUILT", "RewardError", "Rewards", "prediction_of", "reward"]

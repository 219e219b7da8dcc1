"""Recipe sections of the rollout package: model, data, rewards, rollout, server and eval."""

from agentfactory.rollout.config.chains import (
    AgentConfig,
    ChainConfig,
    ContextConfig,
    OutsideOptions,
    ProgramOptions,
    RewardConfig,
)
from agentfactory.rollout.config.data import CurriculumConfig, DataConfig, TaskSource, source_of
from agentfactory.rollout.config.model import LoraConfig, ModelConfig
from agentfactory.rollout.config.recipe import (
    EqualRewards,
    Inflight,
    LateChains,
    OutcomePolicy,
    Part,
    RolloutConfig,
    RolloutRecipe,
    distinct,
)
from agentfactory.rollout.config.sources import SourceConfig, TasksConfig, sections

__all__ = [
    "AgentConfig",
    "ChainConfig",
    "ContextConfig",
    "CurriculumConfig",
    "DataConfig",
    "EqualRewards",
    "Inflight",
    "LateChains",
    "LoraConfig",
    "ModelConfig",
    "OutcomePolicy",
    "OutsideOptions",
    "Part",
    "ProgramOptions",
    "RewardConfig",
    "RolloutConfig",
    "RolloutRecipe",
    "SourceConfig",
    "TaskSource",
    "TasksConfig",
    "distinct",
    "sections",
    "source_of",
]

"""Recipe sections of the rollout package: model, data, rewards, rollout, server and eval."""

from agentfactory.rollout.config.chains import AgentConfig as AgentConfig
from agentfactory.rollout.config.chains import ChainConfig as ChainConfig
from agentfactory.rollout.config.chains import ContextConfig as ContextConfig
from agentfactory.rollout.config.chains import OutsideOptions as OutsideOptions
from agentfactory.rollout.config.chains import ProgramOptions as ProgramOptions
from agentfactory.rollout.config.chains import RewardConfig as RewardConfig
from agentfactory.rollout.config.chains import UserConfig as UserConfig
from agentfactory.rollout.config.data import CurriculumConfig as CurriculumConfig
from agentfactory.rollout.config.data import DataConfig as DataConfig
from agentfactory.rollout.config.data import TaskSource as TaskSource
from agentfactory.rollout.config.data import source_of as source_of
from agentfactory.rollout.config.model import LoraConfig as LoraConfig
from agentfactory.rollout.config.model import ModelConfig as ModelConfig
from agentfactory.rollout.config.recipe import EqualRewards as EqualRewards
from agentfactory.rollout.config.recipe import Inflight as Inflight
from agentfactory.rollout.config.recipe import LateChains as LateChains
from agentfactory.rollout.config.recipe import OutcomePolicy as OutcomePolicy
from agentfactory.rollout.config.recipe import Part as Part
from agentfactory.rollout.config.recipe import RolloutConfig as RolloutConfig
from agentfactory.rollout.config.recipe import RolloutRecipe as RolloutRecipe
from agentfactory.rollout.config.recipe import distinct as distinct
from agentfactory.rollout.config.sources import SourceConfig as SourceConfig
from agentfactory.rollout.config.sources import TasksConfig as TasksConfig
from agentfactory.rollout.config.sources import sections as sections

"""Runs chains of agents that keep their own loop."""

from collections.abc import Sequence

from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import RolloutConfig, RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.gateway.client_agents import ClientAgent
from agentfactory.rollout.gateway.gateway_episode import GatewayEpisode
from agentfactory.rollout.gateway.gateway_server import Gateway
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.template_renderer import TemplateRenderer
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.tools.errors import SettingError
from agentfactory.tools.sessions.toolset import Toolset


class GatewayRunner(ChainRunner):
    """Runs chains of one recipe, whose agent asks `gateway` for its turns."""

    def __init__(
        self,
        recipe: RolloutRecipe,
        renderer: TemplateRenderer,
        client: InferenceClient,
        toolset: Toolset,
        rewards: Rewards,
        agent: ClientAgent,
        gateway: Gateway,
    ):
        """Raises SettingError: see ChainRunner and `check_recipe`."""
        check_recipe(recipe.rollout, renderer.parser.native)
        super().__init__(recipe, renderer, client, toolset, rewards)
        self.client_agent = agent
        self.gateway = gateway

    async def check(self, tasks: Sequence[Task], section: str = "data") -> None:
        """See ChainRunner."""
        self.client_agent.check_rows(tasks, section)
        await super().check(tasks, section)

    def episode(self, trajectory: Trajectory, task: Task, sampling: Sampling) -> GatewayEpisode:
        """See ChainRunner."""
        judged = bool(self.setup.recipe.rewards) or self.toolset.judges
        return GatewayEpisode(self.setup, trajectory, task, sampling, self.gateway, self.client_agent, judged)


def check_recipe(config: RolloutConfig, native: bool) -> None:
    """Raise SettingError for settings that an agent with its own loop leaves without effect. `native`: the tool-call
    format is one of chat templates."""
    own = "the agent, which keeps its own loop, writes its messages itself"
    for field, value, nothing in (
        ("system_prompt", config.system_prompt, None),
        ("assistant_prefix", config.assistant_prefix, ""),
        ("context.policy", config.context.policy, "keep"),
        ("context.keep_images", config.context.keep_images, None),
    ):
        if value not in (None, nothing):
            shown = "null" if nothing is None else repr(nothing)
            raise SettingError(f"rollout.{field}", f"got {value!r}, and {own}", f"set {shown}")
    check_native(config, native)


def check_native(config: RolloutConfig, native: bool) -> None:
    """Raise SettingError for a tool-call format that is not one of chat templates."""
    if not native:
        problem = f"got {config.parser!r}, which writes calls as text; the agent's client gets them as calls"
        raise SettingError("rollout.parser", problem, "name the format of the model's chat template, such as hermes")

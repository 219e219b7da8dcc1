"""The runner of chains whose agents have their own loop."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from agentfactory.base.errors import SettingError
from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.config import RolloutConfig, RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.gateway.client_agents import ClientAgent
from agentfactory.rollout.gateway.gateway_chain import GatewayChain
from agentfactory.rollout.gateway.gateway_server import Gateway
from agentfactory.rollout.gateway.sampled_turns import RequestedTurns
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.tools.sessions.toolset import Toolset


class GatewayRunner(ChainRunner):
    """A runner of chains whose agent requests its turns from `gateway`."""

    def __init__(
        self,
        recipe: RolloutRecipe,
        renderer: Renderer,
        client: InferenceClient,
        toolset: Toolset,
        rewards: Rewards,
        agent: ClientAgent,
        gateway: Gateway,
    ):
        """Create a runner. Raise SettingError as ChainRunner and `check_recipe` do."""
        check_recipe(recipe.rollout, renderer.parser.native)
        super().__init__(recipe, renderer, client, toolset, rewards)
        self.client_agent = agent
        self.gateway = gateway

    async def check(self, tasks: Sequence[Task], section: str = "data") -> None:
        """See ChainRunner."""
        self.client_agent.check_rows(tasks, section)
        await super().check(tasks, section)

    def check_prompts(self, tasks: Sequence[Task], section: str) -> None:
        """Check nothing: the agent writes its prompts itself."""

    @asynccontextmanager
    async def begun(self, episode: Episode) -> AsyncIterator[None]:
        """See Runner."""
        chain = episode.trajectory
        folder = self.client_agent.folder(chain.id, chain.workspaces)
        async with self.client_agent.begun(chain.id), folder as episode.workspace:
            yield

    def player(self, episode: Episode) -> GatewayChain:
        """See Runner."""
        longest = self.setup.config.max_total_tokens
        turns = RequestedTurns(episode.trajectory.rows, self.renderer, self.sampler, longest)
        judged = bool(self.setup.recipe.rewards) or self.toolset.judges
        return GatewayChain(episode, turns, self.gateway, self.client_agent, judged)


def check_recipe(config: RolloutConfig, native: bool) -> None:
    """Raise SettingError for settings that have no effect on an agent with its own loop. `native`: the tool-call format
    is one of chat templates."""
    own = "but an agent with its own loop writes its messages itself"
    for field, value, nothing in (
        ("system_prompt", config.system_prompt, None),
        ("assistant_prefix", config.assistant_prefix, ""),
        ("context.policy", config.context.policy, "keep"),
        ("context.keep_images", config.context.keep_images, None),
    ):
        if value not in (None, nothing):
            shown = "null" if nothing is None else repr(nothing)
            raise SettingError(f"rollout.{field}", f"got {value!r}, {own}", f"set {shown}")
    check_native(config, native)


def check_native(config: RolloutConfig, native: bool) -> None:
    """Raise SettingError if the tool-call format is not one of chat templates."""
    if not native:
        problem = f"got {config.parser!r}, a text format, but the agent's client expects structured tool calls"
        raise SettingError("rollout.parser", problem, "name the format of the model's chat template, such as hermes")

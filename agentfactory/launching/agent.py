"""`Agent` for scripts and notebooks: a model, tools and a reward, run by the engine that training uses."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import Message
from agentfactory.launching.child_processes import Child
from agentfactory.launching.run_folder import ADAPTER, base_of_adapter
from agentfactory.launching.start_server import serve
from agentfactory.recipe.field_errors import setting_error
from agentfactory.rollout.chains.agent_hooks import AgentHooks
from agentfactory.rollout.chains.chain_runner import ENDINGS, ChainRunner
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import RewardConfig, RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.evaluation.evaluate import open_runner
from agentfactory.rollout.images.parts import clean_row
from agentfactory.rollout.inference.http_transport import ServerUnreachableError
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.inference.server_command_line import missing_from
from agentfactory.rollout.rewards import Rewards, prediction_of
from agentfactory.rollout.text.tokenizer import load_tokenizer
from agentfactory.rollout.trajectory import Trajectory, chain_id

_Reward = Callable[..., Any] | RewardConfig | str
_RETRY_SECONDS = 30.0
"""Seconds to retry a server that went away; short, because the user waits for a script."""


@dataclass(frozen=True)
class AgentResult:
    """The result of `Agent.run`: its chains."""

    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float | None]:
        """Each chain's reward; None for a chain that failed, and for all chains if nothing gives rewards."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def answers(self) -> list[str]:
        return [prediction_of(trajectory) for trajectory in self.trajectories]


@dataclass(frozen=True)
class _Engine:
    """Open resources of an agent: `weights` is the server's name for the weights, `server` the started one, if any."""

    runner: ChainRunner
    weights: str
    server: Child | None


class Agent(AgentHooks):
    """A model that acts with tools.

        async with Agent("http://127.0.0.1:8000", tools=[search], reward=is_right) as agent:
            result = await agent.run("Who wrote Emma?", answer="Jane Austen", num_chains=8)
            print(result.rewards)

    Without `async with`, the first `run` opens it and `close` closes it. It uses the same engine as training:
    `rollout.agent` may name a subclass that overrides `generate` or `parse`; training creates it without arguments."""

    def __init__(
        self,
        model_or_url: str | Path | None = None,
        tools: Sequence[Any] = (),
        reward: _Reward | list[_Reward] | None = None,
        *,
        engine: str = "vllm",
        tokenizer: str | Path | None = None,
        weights: str | None = None,
        **recipe: Any,
    ) -> None:
        """Create the agent without starting anything. Raises SettingError if an argument is invalid.

        Args:
            model_or_url: Address of a running inference server, or a model folder, a checkpoint or a hub name to serve.
            tools: `@tool` functions and methods, `Environment` classes, `MCPServer` objects, and names as in a recipe.
            reward: A function, a name, a `RewardConfig`, or a list of these, which are added up; None: environments'.
            engine: The engine that serves a model without a running server: vllm, or embedded (small models).
            tokenizer: Folder or hub name, if this machine has no tokenizer under the server's name for its model.
            weights: The server's name for the weights; default: the weights that it was started with.
            **recipe: Further sections of a recipe, such as rollout={"temperature": 0.7}.
        """
        rewards = [] if reward is None else reward if isinstance(reward, list) else [reward]
        self._rewards = Rewards(rewards, Path.cwd())
        self._judged = bool(rewards)
        self._objects = [tool for tool in tools if not isinstance(tool, str)]
        self._model = None if model_or_url is None else str(model_or_url)
        is_url = self._model is not None and self._model.startswith(("http://", "https://"))
        server = {"engine": engine, "retry_seconds": _RETRY_SECONDS, **recipe.pop("server", {})}
        path = self._model if tokenizer is None else str(tokenizer)
        given = {
            **recipe,
            "tools": [tool for tool in tools if isinstance(tool, str)],
            "model": {"path": path or "", **recipe.pop("model", {})},
            "server": {**server, "url": self._model} if is_url else server,
        }
        try:
            self._recipe = RolloutRecipe.model_validate(given)
        except ValidationError as errors:
            raise setting_error(errors, given, RolloutRecipe) from None
        if fault := self._recipe.server.quantization_fault():
            raise SettingError("server.quantization", *fault)
        self._tokenizer = tokenizer
        self._weights = weights
        self._numbers = count()
        self._owner: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[_Engine]
        self._closing: asyncio.Event

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(
        self, messages: str | list[Message], max_turns: int | None = None, num_chains: int = 1, **fields: Any
    ) -> AgentResult:
        """Run `num_chains` chains on one task, concurrently: `messages` is a question or opening messages, `max_turns`
        the maximum of assistant turns (default: rollout.max_turns), `fields` the task's other fields, for tools and
        rewards; `images` stand where the text says `<image>`, or first. A chain that fails has an outcome and an
        `error`. Raises ServerUnreachableError or ChildFailed if the server is gone, RunFolderError for an adapter
        without its base, ValueError if a reward lacks a field."""
        if min(num_chains, 1 if max_turns is None else max_turns) < 1:
            raise ValueError(f"got max_turns={max_turns} and num_chains={num_chains}; use at least 1")
        opening: Task = {"question": messages} if isinstance(messages, str) else {"messages": messages}
        task = clean_row({**opening, **fields}, Path.cwd())
        self._rewards.check(task)
        engine = await self._open()
        runner = engine.runner if max_turns is None else engine.runner.with_max_turns(max_turns)
        task = await runner.take(task, "fields")
        scored = ENDINGS if self._judged or runner.toolset.judges else frozenset()
        name, temperature = f"run{next(self._numbers)}", self._recipe.rollout.temperature
        ids = [chain_id(name, number) for number in range(num_chains)]
        chains = [runner.run(chain, task, Sampling(engine.weights, temperature, chain), scored) for chain in ids]
        try:
            return AgentResult((await runner.run_group(name, task, chains)).trajectories)
        except ServerUnreachableError:
            if engine.server is not None and engine.server.process.poll() is not None:
                raise engine.server.failure() from None
            raise

    async def close(self) -> None:
        """Close connections, tools, and a server that the agent started. `run` opens them again."""
        if self._owner is None:
            return
        owner, self._owner = self._owner, None
        if self._opened.done():
            self._closing.set()
        else:
            owner.cancel()
        with suppress(asyncio.CancelledError):
            await owner

    async def _open(self) -> _Engine:
        if self._owner is None or self._owner.done():
            self._opened = asyncio.get_running_loop().create_future()
            self._closing = asyncio.Event()
            self._owner = asyncio.create_task(self._own(self._opened, self._closing), name="agent")
        return await asyncio.shield(self._opened)

    async def _own(self, opened: asyncio.Future[_Engine], closing: asyncio.Event) -> None:
        # one asyncio task opens and closes the engine, because each notebook cell runs in a task of its own
        try:
            async with self._engine() as engine:
                opened.set_result(engine)
                await closing.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)
        finally:
            opened.cancel()

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[_Engine]:
        if self._model is None:
            raise ValueError("Agent: there is no model to run; give model_or_url, a model folder or a server's address")
        recipe, adapters, weights = self._recipe, dict[str, Path](), self._weights
        async with AsyncExitStack() as stack:
            if recipe.server.url is not None:
                child, url = None, self._model
            else:
                server = recipe.server
                python = server.vllm.python or server.sglang.python
                if server.engine != "embedded" and server.starts and (missing := missing_from(python, server.engine)):
                    where = "here" if python is None else f"for server={{'options': {{'python': {python!r}}}}}"
                    raise ValueError(
                        f"engine: {missing} is not installed {where}; install it, give the address of a running "
                        "server, or use engine='embedded' (small models)"
                    )
                folder = Path(self._model)
                if (folder / ADAPTER).is_file():
                    recipe = recipe.with_model(base_of_adapter(folder))
                    adapters, weights = {"checkpoint": folder}, "checkpoint"
                child, url = await stack.enter_async_context(serve(recipe, adapters))
            card = await self._card(url, weights)
            if self._tokenizer is None and recipe.server.url is not None:
                path = str(card.get("root") or card["id"])
                try:
                    load_tokenizer(path)
                except ValueError as error:
                    problem = f"the server at {url} calls its model {path}, and there is no tokenizer of that name here"
                    raise ValueError(f"tokenizer: {problem}; give tokenizer=FOLDER or a hub name") from error
                recipe = recipe.with_model(path)
            if "max_total_tokens" not in recipe.rollout.model_fields_set and card.get("max_model_len"):
                rollout = recipe.rollout.model_copy(update={"max_total_tokens": card["max_model_len"]})
                recipe = recipe.model_copy(update={"rollout": rollout})
            runner = await stack.enter_async_context(
                open_runner(recipe, Path.cwd(), url, objects=self._objects, rewards=self._rewards, agent=self)
            )
            yield _Engine(runner, weights or card["id"], child)

    async def _card(self, url: str, weights: str | None) -> dict[str, Any]:
        server = self._recipe.server
        async with InferenceClient(url, server.api_key_env, server.retry_seconds) as client:
            await client.check_routes()
            cards = await client.connection.models(url)
        names = [card["id"] for card in cards]
        if weights is not None and weights not in names:
            raise ValueError(f"weights: the server at {url} has none called {weights!r}; it has {', '.join(names)}")
        return next(card for card in cards if not card.get("parent"))

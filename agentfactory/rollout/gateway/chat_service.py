"""Serves a model to any client of the gateway's protocols, and logs each turn to the token: `serve RECIPE --chat`."""

import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from agentfactory.rollout.chains.chain_runner import begin
from agentfactory.rollout.chains.episode import Setup
from agentfactory.rollout.chains.sampling import Sampler, Sampling
from agentfactory.rollout.chains.turn import AgentHooks
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.gateway.gateway_runner import check_native
from agentfactory.rollout.gateway.gateway_server import Endpoint, Gateway
from agentfactory.rollout.gateway.gateway_turns import AskedTurns
from agentfactory.rollout.gateway.message_equality import print_of
from agentfactory.rollout.gateway.request_options import Asked, Said, wrong
from agentfactory.rollout.gateway.responses import Stored
from agentfactory.rollout.gateway.turn_tree import Plan
from agentfactory.rollout.inference.inference_client import Completion, InferenceClient
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.tools.calls.limits import Rates

_MOST_CONVERSATIONS = 4096
"""How many conversations are kept: one that was left longest is forgotten, and its turns are rendered again."""
_UNLIMITED = 1 << 31
_HOTTEST = 100


class ChatService:
    """Answers all clients of a model: a conversation keeps the ids that were sampled. See server.Asking.

    `log` gets a line of JSON for each turn: its conversation, what it was sampled after, and what was sampled.
    """

    def __init__(self, setup: Setup, model: str, log: TextIO) -> None:
        self.temperature = setup.config.temperature
        self.stored = Stored()
        self._most = setup.config.max_tokens
        free = setup.config.model_copy(update={"max_turns": _UNLIMITED, "max_tokens": setup.config.max_total_tokens})
        self._setup = replace(setup, recipe=setup.recipe.model_copy(update={"rollout": free}))
        self._model = model
        self._log = log
        self._conversations: OrderedDict[str, _Conversation] = OrderedDict()
        self._begun = 0

    async def admit(self, asked: Asked) -> Awaitable[list[Said]]:
        """See server.Asking."""
        asked = replace(asked, max_tokens=asked.max_tokens or self._most)
        return await self._conversation(asked).admit(_without_temperature(asked))

    async def count(self, asked: Asked) -> int:
        """See server.Asking."""
        return await self._conversation(asked).count(asked)

    def _conversation(self, asked: Asked) -> "_Conversation":
        """Return the conversation that begins as this one does, up to its first turn."""
        roles = [*(message["role"] for message in asked.messages), "assistant"]
        tools = [spec.to_openai() for spec in asked.specs]
        key = json.dumps([tools, [print_of(message) for message in asked.messages[: roles.index("assistant")]]])
        if key not in self._conversations:
            sampling = Sampling(self._model, self.temperature, f"chat{self._begun}")
            self._conversations[key] = _Conversation(self._setup, sampling, self._log)
            self._begun += 1
        self._conversations.move_to_end(key)
        if len(self._conversations) > _MOST_CONVERSATIONS:
            self._conversations.popitem(last=False)
        return self._conversations[key]


class _Conversation(AskedTurns):
    """One conversation. A request is sampled at the temperature that it asks for: nothing is trained on it."""

    def __init__(self, setup: Setup, sampling: Sampling, log: TextIO) -> None:
        super().__init__(setup, begin(sampling.seed), {}, sampling)
        self._log = log

    def _sampling(self, asked: Asked) -> Sampling:
        return replace(self.sampling, temperature=asked.options.get("temperature", self.temperature))

    def _take(self, asked: Asked, plan: Plan, completion: Completion) -> Said:
        said = super()._take(asked, plan, completion)
        node = self.tree.nodes[-1]
        row = self.tree.rows[node.row]
        start = node.end - len(node.token_ids)
        line = {
            "time": time.time(),
            "conversation": self.trajectory.id,
            "turn": node.number,
            "temperature": self._sampling(asked).temperature,
            "prompt_ids": row.token_ids[:start],
            "token_ids": node.token_ids,
            "logprobs": row.logprobs[start : node.end],
            "versions": [asdict(span) for span in completion.versions],
            "messages": plan.given,
            "message": node.message,
            "stop": said.stop,
            "cut": said.cut,
        }
        self._log.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._log.flush()
        return said

    def _fail(self, error: Exception) -> None:
        """Do nothing: the request is refused, and the next one may succeed."""


def _without_temperature(asked: Asked) -> Asked:
    """Move the temperature from what is not applied to the options. At temperature 0 nothing is drawn, so that nothing
    that changes the draw is missed. Raises Refusal."""
    unmet = dict(asked.unmet)
    temperature = unmet.pop("temperature", None)
    if temperature is None:
        return asked
    if type(temperature) not in (int, float) or not 0 <= temperature <= _HOTTEST:
        raise wrong(f"temperature: got {temperature!r:.200}; use a number from 0 to {_HOTTEST}")
    if temperature == 0:
        for name in ("seed", "top_p", "top_k", "min_p"):
            unmet.pop(name, None)
    return replace(asked, unmet=unmet, options={**asked.options, "temperature": float(temperature)})


@asynccontextmanager
async def serve_chat(
    recipe: RolloutRecipe, url: str, model: str, log: Path, port: int = 0, key: str | None = None, base: Path = Path()
) -> AsyncIterator[Endpoint]:
    """Answer chat requests with the model called `model` on the server at `url`, at `port` (0: a free one), for clients
    that have `key` (None: a random one), and append each turn to the file `log`.

    Raises SettingError for a tool-call format that no client could read.
    """
    with TemporaryDirectory() as images, log.open("a", encoding="utf-8", errors="replace") as file:
        renderer = load_renderer(
            recipe.model,
            recipe.rollout.parser,
            reasoning=recipe.rollout.reasoning,
            base=base,
            images=Path(images),
        )
        check_native(recipe.rollout, renderer.parser.native)
        async with InferenceClient(url, recipe.server.api_key_env) as client, Gateway(port) as gateway:
            await client.check_routes()
            sampler = Sampler(recipe, client, renderer.stop_token_ids, renderer.sight)
            setup = Setup(recipe, renderer, sampler, [], AgentHooks(), Rates({}))
            with gateway.serving(ChatService(setup, model, file), key) as endpoint:
                yield endpoint

"""`serve RECIPE --chat`: a server of a model for clients of the gateway's protocols, which logs each turn's tokens."""

import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from agentfactory.rollout.chains.agent_hooks import check_native
from agentfactory.rollout.chains.sampling import Sampler, Sampling
from agentfactory.rollout.config import RolloutConfig, RolloutRecipe
from agentfactory.rollout.gateway.gateway_server import Asking, Endpoint, Gateway
from agentfactory.rollout.gateway.request_bodies import most_bytes
from agentfactory.rollout.gateway.request_options import Reply, TurnRequest, too_long, wrong
from agentfactory.rollout.gateway.sampled_turns import RequestedTurns, unavailable
from agentfactory.rollout.gateway.turn_tree import Plan, print_of
from agentfactory.rollout.inference.http_transport import InferenceError, ServerUnreachableError
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.tools.images.lru_cache import ByteCache

_MOST_CONVERSATIONS = 4096
"""Maximum number of cached conversations; turns of an evicted conversation are rendered again."""
_HOTTEST = 100


class ChatService(Asking):
    """A service for all clients of a model, whose conversations keep the sampled token ids. `log` gets a JSON line per
    turn: its conversation, prompt ids and sampled tokens."""

    def __init__(self, config: RolloutConfig, renderer: Renderer, sampler: Sampler, model: str, log: TextIO) -> None:
        longest = config.max_total_tokens
        super().__init__(config.temperature, most_bytes(longest, renderer.images), partial(too_long, longest))
        self._config = config
        self._renderer = renderer
        self._sampler = sampler
        self._model = model
        self._log = log
        self._conversations: ByteCache[str, RequestedTurns] = ByteCache(_MOST_CONVERSATIONS)
        self._begun = 0

    async def admit(self, turn_request: TurnRequest) -> Awaitable[list[Reply]]:
        conversation = self._conversation(turn_request)
        turn_request = _without_temperature(turn_request)
        conversation.check(turn_request)
        plan = await conversation.plan(turn_request)
        most = min(conversation.room(plan), turn_request.max_tokens or self._config.max_tokens)
        return self._sample(conversation, replace(turn_request, messages=[]), plan, most)

    async def count(self, turn_request: TurnRequest) -> int:
        return len((await self._conversation(turn_request).plan(turn_request)).ids)

    def _conversation(self, turn_request: TurnRequest) -> RequestedTurns:
        roles = [*(message["role"] for message in turn_request.messages), "assistant"]
        tools = [spec.to_openai() for spec in turn_request.specs]
        key = json.dumps([tools, [print_of(message) for message in turn_request.messages[: roles.index("assistant")]]])
        if (turns := self._conversations.get(key)) is None:
            longest = self._config.max_total_tokens
            turns = RequestedTurns([], self._renderer, self._sampler, longest, f"chat{self._begun}")
            self._begun += 1
            self._conversations.put(key, turns)
        return turns

    async def _sample(
        self, conversation: RequestedTurns, turn_request: TurnRequest, plan: Plan, most: int
    ) -> list[Reply]:
        # use the request's temperature, since these turns are not trained
        sampling = Sampling(self._model, turn_request.options.get("temperature", self.temperature), conversation.name)
        try:
            turns = await conversation.sample(turn_request, plan, sampling, most)
        except (InferenceError, ServerUnreachableError) as error:
            raise unavailable(error) from error
        for turn in turns:
            node = turn.node
            row = conversation.tree.rows[node.row]
            start = node.end - len(node.token_ids)
            line = {
                "time": time.time(),
                "conversation": conversation.name,
                "turn": node.number,
                "temperature": sampling.temperature,
                "prompt_ids": row.token_ids[:start],
                "token_ids": node.token_ids,
                "logprobs": row.logprobs[start : node.end],
                "versions": [asdict(span) for span in turn.completion.versions],
                "messages": plan.given,
                "message": node.message,
                "stop": turn.reply.stop,
                "cut": turn.reply.cut,
            }
            self._log.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._log.flush()
        return [turn.reply for turn in turns]


def _without_temperature(turn_request: TurnRequest) -> TurnRequest:
    """Move the temperature from `unmet` to the options. At temperature 0, also remove parameters that only affect
    random sampling from `unmet`. Raise Refusal if the temperature is invalid."""
    unmet = dict(turn_request.unmet)
    temperature = unmet.pop("temperature", None)
    if temperature is None:
        return turn_request
    if type(temperature) not in (int, float) or not 0 <= temperature <= _HOTTEST:
        raise wrong(f"temperature: got {temperature!r:.200}; use a number from 0 to {_HOTTEST}")
    if temperature == 0:
        for name in ("seed", "top_p", "top_k", "min_p"):
            unmet.pop(name, None)
    return replace(turn_request, unmet=unmet, options={**turn_request.options, "temperature": float(temperature)})


@asynccontextmanager
async def serve_chat(
    recipe: RolloutRecipe, url: str, model: str, log: Path, port: int = 0, key: str | None = None, base: Path = Path()
) -> AsyncIterator[Endpoint]:
    """Serve chat requests at `port` (0: a free one) with the model `model` of the server at `url`, for clients with
    `key` (None: a random one), and append each turn to the file `log`. Raise SettingError for a text tool-call format,
    which clients cannot parse."""
    rollout = recipe.rollout
    with TemporaryDirectory() as folder, log.open("a", encoding="utf-8", errors="replace") as file:
        images = Path(folder)
        renderer = load_renderer(recipe.model, rollout.parser, reasoning=rollout.reasoning, base=base, images=images)
        check_native(rollout, renderer.parser.native)
        async with InferenceClient(url, recipe.server.api_key_env) as client, Gateway(port) as gateway:
            await client.check_routes()
            sampler = Sampler(recipe, client, renderer.stop_token_ids, renderer.images)
            with gateway.serving(ChatService(rollout, renderer, sampler, model, file), key) as endpoint:
                yield endpoint

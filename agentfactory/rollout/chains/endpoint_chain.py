"""Chains whose turns come from a chat endpoint: a baseline with the same tools, rewards and limits as the policy. These
chains have messages but no token rows: use them for inspection and comparison, not for training. With a native
`rollout.parser`, the endpoint receives the tools, and writes and parses calls in its own format. With a text format,
`rollout.parser` instructs the endpoint and parses its text. Token counts come from the endpoint's `usage`."""

import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentfactory.base.messages import Message, ToolCall, ToolSpec
from agentfactory.rollout.chains.chain_runner import Runner
from agentfactory.rollout.chains.chat_endpoint import ChatEndpoint, ChatEndpointError
from agentfactory.rollout.chains.context import Context
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.simulated_user import Users, open_users
from agentfactory.rollout.chains.tool_loop import TakenTurn, ToolLoop
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.images.image_intake import Images, TextOnly
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.dialogue import Dialogue
from agentfactory.rollout.text.load_renderer import load_images, load_renderer
from agentfactory.rollout.text.parsers import AUTO, NativeParser, Parser, load_parser
from agentfactory.rollout.text.parsers.parser import split_reasoning
from agentfactory.rollout.text.renderer import Parsed
from agentfactory.rollout.text.stop_strings import find_stop
from agentfactory.rollout.trajectory import Activity
from agentfactory.tools.sessions.toolset import Toolset, open_toolset

logger = logging.getLogger(__name__)


class EndpointTurns:
    """The turns of one chain from an endpoint, as messages without rows; see Turns."""

    def __init__(self, episode: Episode, endpoint: ChatEndpoint, parser: Parser) -> None:
        self.episode = episode
        self.endpoint = endpoint
        self.parser = parser
        self.context = Context([])
        self._length = 0

    def begin(self, opening: list[Message]) -> None:
        self.context = Context(opening)

    async def take(self, anchor: str | None) -> TakenTurn:
        episode, setup, trajectory = self.episode, self.episode.setup, self.episode.trajectory
        left = episode.budget.left(self._length)
        specs = setup.specs if self.parser.native else []
        with episode.timeline.measure(Activity.MODEL, trajectory.turns):
            shown = await setup.images.for_endpoint(self.context.messages)
            answer = await self.endpoint.ask(shown, specs, episode.sampling.temperature, left)
        episode.note_turn(answer.sampled, anchor)
        self._length = answer.length or self._length
        taken = {call["id"] for message in trajectory.messages for call in message.get("tool_calls") or []}
        parsed = read_answer(answer.message, self.parser, episode.counts["tool_calls"], setup.specs, taken)
        trajectory.messages.append(parsed.message)
        self.context.say(parsed.message)
        return TakenTurn(parsed, answer.cut, answer.sampled or left)

    async def go_on(self, answers: list[Message]) -> None:
        """Do nothing: the next request contains the whole conversation."""


def read_answer(
    message: dict[str, Any], parser: Parser, first_call: int, specs: Sequence[ToolSpec], taken: set[str]
) -> Parsed:
    """Parse an answer of the endpoint as a turn. A call keeps a usable id that is not in `taken`, the chain's ids."""
    content = _said(message)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    thought = {"reasoning_content": str(reasoning)} if reasoning else {}
    said: Message = {"role": "assistant", "content": content, **thought}
    if not parser.native:
        rest = split_reasoning(content, opened=False)[2]
        stop = find_stop(rest, parser.stops)
        found = parser.parse(rest if stop is None else rest[: stop[0]], specs)
        calls = [ToolCall(f"call_{first_call + n}", *call) for n, call in enumerate(found.calls)]
        return Parsed(said, [] if found.error else calls, found.error, found.answer)
    made, taken = [], {*taken}
    for number, raw in enumerate(message.get("tool_calls") or []):
        try:
            name, arguments = _call(raw)
        except ValueError as error:
            # keep the call as text, since no API accepts a malformed call in the history
            written = json.dumps(message["tool_calls"], ensure_ascii=False)
            said["content"] = f"{content}\n{written}".strip()
            return Parsed(said, error=f"Malformed tool call {number + 1}: {error}.")
        given = raw.get("id")
        usable = isinstance(given, str) and given and given not in taken
        identity = given if usable else f"call_{first_call + number}"
        taken.add(identity)
        made.append(ToolCall(identity, name, arguments))
    return Parsed(said | ({"tool_calls": [call.to_openai() for call in made]} if made else {}), made)


def _images(recipe: RolloutRecipe, folder: Path | None) -> Images:
    try:
        return (None if folder is None else load_images(recipe.model, folder)) or TextOnly()
    except OSError as error:  # the hub is out of reach; a text baseline does not need the policy's files
        logger.info("%s cannot be looked up, so images become text: %s", recipe.model.path, error)
        return TextOnly()


def _said(message: dict[str, Any]) -> str:
    """Return the text of an answer, without reasoning; if it has no text, the refusal."""
    content = message.get("content") or message.get("refusal") or ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "".join(text for text in texts if isinstance(text, str))
    return str(content)


def _call(raw: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and arguments of a call. Raise ValueError, with a message for the model, if it is invalid."""
    function = raw.get("function") if isinstance(raw, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ValueError("it names no function")
    arguments = function.get("arguments") or "{}"  # some endpoints leave out an empty object
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments of {name} are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are not a JSON object")
    return name, arguments


class ChatRunner(Runner):
    """A runner of chains whose turns come from a chat endpoint, which writes and parses calls of native formats."""

    def __init__(
        self,
        recipe: RolloutRecipe,
        endpoint: ChatEndpoint,
        toolset: Toolset,
        rewards: Rewards,
        base: Path = Path(),
        images: Path | None = None,
        users: Users | None = None,
    ):
        rollout, cut = recipe.rollout, None
        if recipe.limits.result_tokens is not None:
            # the limit counts the policy's tokens here too
            cut = load_renderer(recipe.model, rollout.parser, tools=False, base=base).cut
        self.endpoint = endpoint
        self.parser = NativeParser() if rollout.parser == AUTO else load_parser(rollout.parser, base)
        super().__init__(recipe, Dialogue(self.parser), _images(recipe, images), cut, toolset, rewards, users=users)

    def player(self, episode: Episode) -> ToolLoop:
        return ToolLoop(episode, EndpointTurns(episode, self.endpoint, self.parser), self.begin_user(episode))


def check_recipe(recipe: RolloutRecipe) -> None:
    """Raise ChatEndpointError if a recipe uses features that a chat endpoint does not support."""
    agent, context, prefix = recipe.rollout.agent, recipe.rollout.context, recipe.rollout.assistant_prefix
    refused = {
        "agent=null": agent and f"{agent.name or agent.command!r}, which needs a server that takes token ids",
        "context.policy=keep": context.policy != "keep" and f"{context.policy!r}, which needs token rows",
        "context.keep_images=null": context.keep_images and f"{context.keep_images}, which needs token rows",
        "assistant_prefix=''": prefix and f"{prefix!r}, but an endpoint cannot be forced to start its turns with it",
    }
    for setting, problem in refused.items():
        if problem:
            field = f"rollout.{setting.partition('=')[0]}"
            raise ChatEndpointError(field, f"got {problem}", f"evaluate with rollout.{setting}")
    for number, reward in enumerate(recipe.rewards):
        if reward.reward == "length" and not reward.options.get("turns"):
            problem = "'length' counts tokens, which needs token rows"
            raise ChatEndpointError(f"rewards.{number}", problem, "count turns (options={turns: true}), or remove it")


@asynccontextmanager
async def open_chat_runner(
    recipe: RolloutRecipe, base: Path, url: str, model: str | None = None, images: Path | None = None
) -> AsyncIterator[ChatRunner]:
    """Open a runner of chains with the endpoint at `url` and its `model` (None: the only one that it lists). `images`
    is the folder for images; None: they become text. Raise ChatEndpointError or ServerUnreachableError."""
    check_recipe(recipe)
    server = recipe.server
    async with (
        Rewards(recipe.rewards, base) as rewards,
        ChatEndpoint(url, model, server.api_key_env, server.retry_seconds, recipe.eval.request) as endpoint,
        open_toolset(recipe, base) as toolset,
        open_users(recipe.rollout.user, base) as users,
    ):
        await endpoint.check_routes()
        runner = ChatRunner(recipe, endpoint, toolset, rewards, base, images, users)
        temperatures = [recipe.rollout.temperature, *([0.0] if recipe.eval.greedy else [])]
        await endpoint.try_out(toolset.specs if runner.parser.native else [], temperatures)
        yield runner

"""Chains against a chat endpoint: a baseline with the same tools, rewards and limits as the policy.

These chains have messages and no token rows: use them for inspection and comparison, not for training. With a native
`rollout.parser`, the endpoint gets the tools and writes and parses calls in its own format. With a text format, the
endpoint gets the instructions of `rollout.parser`, which also parses the endpoint's text. Token counts come from the
endpoint's `usage`.
"""

import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.chat_endpoint import ChatEndpoint, ChatEndpointError
from agentfactory.rollout.chains.episode import Episode, Piece, Setup
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.images.parts import show_in_user_turns
from agentfactory.rollout.inference.connection import ContextOverflowError
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.load_renderer import load_renderer, load_sight
from agentfactory.rollout.text.parsers import AUTO, NativeParser, Parser, load_parser
from agentfactory.rollout.text.parsers.reasoning_tags import split_reasoning
from agentfactory.rollout.text.renderer import Parsed
from agentfactory.rollout.text.stop_strings import find_stop
from agentfactory.rollout.text.transcript import transcript
from agentfactory.rollout.trajectory import Activity, Row, Trajectory
from agentfactory.tools.messages import Message, ToolCall, ToolResult, ToolSpec, text_of
from agentfactory.tools.sessions.toolset import Toolset, open_toolset

if TYPE_CHECKING:
    from agentfactory.rollout.images.image_intake import Sight

logger = logging.getLogger(__name__)


class ChatEpisode(Episode):
    """One chain against an endpoint, with messages but no rows."""

    sampled: int | None = 0
    length = 0

    def __init__(
        self,
        setup: Setup,
        trajectory: Trajectory,
        task: Task,
        sampling: Sampling,
        endpoint: ChatEndpoint,
        words: "ChatWords",
    ) -> None:
        super().__init__(setup, trajectory, task, sampling)
        self.endpoint = endpoint
        self.words = words

    async def _take_turn(self) -> tuple[Completion, Parsed]:
        config, words = self.config, self.words
        left = min(config.max_tokens, config.max_total_tokens - self.length)
        if left <= 0:
            raise ContextOverflowError(f"the conversation has {self.length} tokens, of {config.max_total_tokens}")
        specs = self.specs if words.parser.native else []
        with self.timeline.measure(Activity.MODEL, self.trajectory.turns):
            answer = await self.endpoint.ask(await self._shown(), specs, self.sampling.temperature, left)
        self.trajectory.note_turn(self.anchor)
        self.length = answer.length or self.length
        self.sampled = None if self.sampled is None or answer.sampled is None else self.sampled + answer.sampled
        parsed = words.read(answer.message, self.counts["tool_calls"], self.specs, self._call_ids())
        self.trajectory.messages.append(parsed.message)
        self.context.say(parsed.message)
        self.counts["truncated_turns"] += answer.cut
        # the ids are unknown; their number is reported if the turn was cut
        return Completion([], [], [], answer.cut, [1] * (answer.sampled or left)), parsed

    def _call_ids(self) -> set[str]:
        return {call["id"] for message in self.trajectory.messages for call in message.get("tool_calls") or []}

    async def _shown(self) -> list[Message]:
        """Return the conversation with the images themselves, or with text in their place if the policy sees none."""
        sight, messages = self.words.sight, self.context.messages
        if sight is not None:
            return await sight.with_data(show_in_user_turns(messages))
        return [{**message, "content": text_of(message.get("content") or "")} for message in messages]

    def _opened(self, messages: list[Message]) -> Piece:
        return Piece([])

    def _begin_row(self, piece: Piece) -> None:
        """Do nothing: there are no ids for a row."""

    async def _go_on(self, answers: list[Message]) -> None:
        """Do nothing: the next request contains the whole conversation."""

    def metrics(self) -> dict[str, float]:
        """See Episode. `sampled_tokens` is left out if the endpoint does not count them."""
        metrics = super().metrics()
        del metrics["sampled_tokens"]
        return metrics if self.sampled is None else {**metrics, "sampled_tokens": self.sampled}


class ChatWords:
    """Takes the place of a renderer: prepares messages for an endpoint and reads its answers, without token ids."""

    def __init__(self, parser: Parser, recipe: RolloutRecipe, base: Path, images: Path | None = None):
        self.parser = parser
        # the endpoint gets images in the size that the policy would see
        self.sight = None if images is None else _load_sight(recipe, images)
        self.stop_token_ids: list[int] = []
        self.stops = parser.stops
        self.info: dict[str, Any] = {"choice": "chat endpoint"}
        self.chat_template = ""  # the endpoint's is not known
        self._tokens = None
        if recipe.limits.result_tokens is not None:
            # the baseline's limit counts the policy's tokens too
            self._tokens = load_renderer(recipe.model, recipe.rollout.parser, tools=False, base=base)

    def read(self, message: dict[str, Any], first_call: int, specs: Sequence[ToolSpec], taken: set[str]) -> Parsed:
        """Read an answer of the endpoint as a turn. A call keeps its id unless the id is not text or is in `taken`, the
        chain's ids so far."""
        content = _said(message)
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        thought = {"reasoning_content": str(reasoning)} if reasoning else {}
        if not self.parser.native:
            said: Message = {"role": "assistant", "content": content, **thought}
            rest = split_reasoning(content, opened=False)[2]
            stop = find_stop(rest, self.stops)
            found = self.parser.parse(rest if stop is None else rest[: stop[0]], specs)
            calls = [ToolCall(f"call_{first_call + n}", *call) for n, call in enumerate(found.calls)]
            return Parsed(said, [] if found.error else calls, found.error, found.answer)
        made = []
        for number, raw in enumerate(message.get("tool_calls") or []):
            try:
                name, arguments = _call(raw)
            except ValueError as error:
                # keep the text visible, although no API accepts such a call in the history
                written = json.dumps(message["tool_calls"], ensure_ascii=False)
                said = {"role": "assistant", "content": f"{content}\n{written}".strip(), **thought}
                return Parsed(said, error=f"Malformed tool call {number + 1}: {error}.")
            given = raw.get("id")
            usable = isinstance(given, str) and given and given not in taken
            identity = given if usable else f"call_{first_call + number}"
            taken = taken | {identity}
            made.append(ToolCall(identity, name, arguments))
        said = {"role": "assistant", "content": content, **thought}
        return Parsed(said | ({"tool_calls": [call.to_openai() for call in made]} if made else {}), made)

    def open(self, messages: list[Message], specs: list[ToolSpec]) -> list[int]:
        """Return no ids."""
        return []

    def extend(self, ids: list[int], messages: list[Message], new: list[Message], specs: list[ToolSpec]) -> list[int]:
        """Return no ids."""
        return []

    def parse(
        self, sampled_ids: list[int], first_call: int = 0, prefix: str = "", specs: Sequence[ToolSpec] = ()
    ) -> Parsed:
        """Raises TypeError: an endpoint returns messages; see `read`."""
        raise TypeError("a chat endpoint gives no token ids")

    def parse_text(self, sampled_ids: list[int]) -> Parsed:
        """Raises TypeError, as `parse` does."""
        raise TypeError("a chat endpoint gives no token ids")

    def continuation(self, text: str) -> list[int]:
        """Raises TypeError, as `parse` does."""
        raise TypeError("a chat endpoint gives no token ids")

    def decode(self, ids: list[int]) -> str:
        """Raises TypeError, as `parse` does."""
        raise TypeError("a chat endpoint gives no token ids")

    def stopped(self, ids: list[int]) -> int | None:
        """Raises TypeError, as `parse` does."""
        raise TypeError("a chat endpoint gives no token ids")

    def conversation_row(self, messages: list[Message], specs: list[ToolSpec]) -> Row:
        """Raises TypeError: there are no token ids to make a row of."""
        raise TypeError("a chat endpoint gives no token ids")

    def instructions(self, specs: Sequence[ToolSpec]) -> str | None:
        """See Renderer."""
        return self.parser.instructions(specs)

    def instruct(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> list[Message]:
        """See Renderer."""
        return [line.message for line in transcript(messages, self.parser, specs, True, self.instructions(specs))]

    def answers(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        """See Renderer."""
        return self.parser.answers(calls, results)

    def complaint(self, text: str) -> list[Message]:
        """Return a user's message: a tool's message would have to answer a call."""
        return [{"role": "user", "content": text}]

    def encode(self, prefix: str) -> list[int]:
        """Return no ids: `check_recipe` refuses a prefix."""
        return []

    def cut(self, text: str, max_tokens: int) -> str | None:
        """See Renderer; counts the tokens of `model.path`."""
        if self._tokens is None:
            raise TypeError("only limits.result_tokens cuts results")
        return self._tokens.cut(text, max_tokens)


def _parser(recipe: RolloutRecipe, base: Path) -> Parser:
    """Return the parser of a recipe. An endpoint writes and reads the calls of every native format itself."""
    return NativeParser() if recipe.rollout.parser == AUTO else load_parser(recipe.rollout.parser, base)


def _load_sight(recipe: RolloutRecipe, images: Path) -> "Sight | None":
    try:
        return load_sight(recipe.model, images)
    except OSError as error:  # the policy's files are on the hub, and a baseline of text needs none of them
        logger.info("%s cannot be looked up: images become text: %s", recipe.model.path, error)
        return None


def _said(message: dict[str, Any]) -> str:
    """Return the text of an answer: the text parts without reasoning; if there is no text, the refusal."""
    content = message.get("content") or message.get("refusal") or ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "".join(text for text in texts if isinstance(text, str))
    return str(content)


def _call(raw: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and arguments of a call. Raises ValueError with a message for the model if it is not a valid
    call."""
    function = raw.get("function") if isinstance(raw, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ValueError("it names no function")
    arguments = function.get("arguments") or "{}"  # some endpoints leave out an empty object
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"the arguments of {name} are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are not a JSON object")
    return name, arguments


class ChatRunner(ChainRunner):
    """Runs chains against a chat endpoint."""

    def __init__(
        self,
        recipe: RolloutRecipe,
        endpoint: ChatEndpoint,
        toolset: Toolset,
        rewards: Rewards,
        base: Path = Path(),
        images: Path | None = None,
    ):
        self.endpoint = endpoint
        self.words = ChatWords(_parser(recipe, base), recipe, base, images)
        super().__init__(recipe, self.words, endpoint, toolset, rewards)

    def episode(self, trajectory: Trajectory, task: Task, sampling: Sampling) -> ChatEpisode:
        """See ChainRunner."""
        return ChatEpisode(self.setup, trajectory, task, sampling, self.endpoint, self.words)


def check_recipe(recipe: RolloutRecipe) -> None:
    """Raise ChatEndpointError if a recipe uses features that only its own model supports."""
    if recipe.rollout.agent is not None:
        agent = recipe.rollout.agent
        problem = f"got {agent.name or agent.command!r}, which samples token ids"
        raise ChatEndpointError("rollout.agent", problem, "evaluate with rollout.agent=null")
    if recipe.rollout.context.policy != "keep":
        problem = f"got {recipe.rollout.context.policy!r}, which counts the tokens of rows"
        raise ChatEndpointError("rollout.context.policy", problem, "evaluate with rollout.context.policy=keep")
    if (most := recipe.rollout.context.keep_images) is not None:
        problem = f"got {most}, which begins new rows"
        raise ChatEndpointError(
            "rollout.context.keep_images", problem, "evaluate with rollout.context.keep_images=null"
        )
    for number, reward in enumerate(recipe.rewards):
        if reward.reward == "length" and not reward.options.get("turns"):
            problem = "'length' counts the tokens of rows"
            raise ChatEndpointError(f"rewards.{number}", problem, "count turns ({turns: true}), or leave it out")
    if prefix := recipe.rollout.assistant_prefix:
        problem = f"got {prefix!r}: an endpoint cannot be made to begin its turns with it"
        raise ChatEndpointError("rollout.assistant_prefix", problem, "evaluate with rollout.assistant_prefix=''")


@asynccontextmanager
async def open_chat_runner(
    recipe: RolloutRecipe, base: Path, url: str, model: str | None = None, images: Path | None = None
) -> AsyncIterator[ChatRunner]:
    """Open everything that chains of `recipe` need to run against the endpoint at `url`: its `model` (None: the only
    one that it lists), tools and rewards. `images` is the folder for the images that the chains see; None: they become
    text.

    Raises ChatEndpointError or ServerUnreachableError if no chain could run.
    """
    check_recipe(recipe)
    server = recipe.server
    async with (
        Rewards.load(recipe.rewards, base) as rewards,
        ChatEndpoint(url, model, server.api_key_env, server.retry_seconds, recipe.eval.request) as endpoint,
        open_toolset(recipe, base) as toolset,
    ):
        await endpoint.check_routes()
        runner = ChatRunner(recipe, endpoint, toolset, rewards, base, images)
        native = runner.words.parser.native
        temperatures = [recipe.rollout.temperature, *([0.0] if recipe.eval.greedy else [])]
        await endpoint.try_out(toolset.specs if native else [], temperatures)
        yield runner

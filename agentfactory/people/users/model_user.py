"""`rollout.user: model`: a simulated user whose messages a language model writes."""

import itertools
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import field, replace
from functools import partial
from string import Formatter
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agentfactory.base.messages import Message, ToolSpec, text_of
from agentfactory.people.endpoints import Address, KeyVariable
from agentfactory.rollout.chains.chain_runner import ChainRunner, Runner
from agentfactory.rollout.chains.chat_endpoint import ChatAnswer, ChatEndpoint
from agentfactory.rollout.chains.endpoint_chain import read_answer
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.simulated_user import UserError
from agentfactory.rollout.inference.http_transport import InferenceError, ServerUnreachableError
from agentfactory.rollout.rewards.text import OPTIONS
from agentfactory.rollout.text.parsers import NativeParser
from agentfactory.rollout.text.parsers.parser import split_reasoning
from agentfactory.tools.tool import finish

GUIDELINES = """\
You play the user in a conversation with an assistant. What you write is sent to the assistant, and you see only what \
it answers. Your situation:

{situation}

Write one short message at a time, in the user's words, without quotation marks or notes. Say only what your situation \
says; if the assistant asks for something else, say that you do not know it. Never do the assistant's work. When your \
wish is fulfilled, or clearly refused, write {done}"""
Call = Callable[..., Any]
Policy = Callable[[list[Message], float, int], Awaitable[ChatAnswer]]
"""(messages, temperature, max tokens) -> the answer of the trained model, at the weights of the chain's next turn."""
GREETING = "Hello! How can I help you?"
"""The assistant's first words in the user's own context, if the user begins; the agent does not see them."""
MOST_CALLS = 8
"""Maximum turns with tool calls before a message."""


@dataclass(config=OPTIONS)
class ModelUser:
    """A user played by a language model: one at a chat endpoint, or the trained model itself, at its current weights.
    Its context is its own: a system prompt, and the conversation with the roles exchanged. If a row ends with a user
    message, such as its `question`, the user has said it; otherwise the user begins."""

    prompt: str
    """The user's situation and wish, with `{FIELD}` for fields of the row; literal braces must be doubled."""
    url: Address | None = None
    """Address of an OpenAI-compatible API. Null: the trained model."""
    model: str | None = None
    """Name of the model at `url`."""
    guidelines: str = GUIDELINES
    """The system prompt, with `{situation}` for the filled prompt and `{done}`."""
    done: str | Annotated[list[str], Field(min_length=1)] = "###STOP###"
    """Text by which the user ends the conversation, or several such texts; `{done}` is the first."""
    temperature: Annotated[float, Field(ge=0)] = 0.7
    max_tokens: Annotated[int, Field(gt=0)] = 256
    """Maximum tokens of a message; a longer one is a fault."""
    api_key_env: KeyVariable | None = None
    retry_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Time for retries if the endpoint does not answer; then the chain ends as user_error."""
    prices: tuple[float, float] | None = None
    """Prices of a million tokens read and written, for the metric `user/cost`."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Additional fields of each request."""

    @model_validator(mode="after")
    def _can_speak(self) -> "ModelUser":
        if (self.url is None) != (self.model is None):
            raise ValueError("url and model belong together; set both, or neither for the trained model")
        for name, text in (("prompt", self.prompt), ("guidelines", self.guidelines)):
            try:
                fields = _fields(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}; double literal braces") from None
            if name == "guidelines" and not {"situation", "done"} >= set(fields) >= {"situation"}:
                raise ValueError("guidelines: it must contain {situation}, and may contain {done}")
        return self

    def __post_init__(self) -> None:
        self._endpoint: ChatEndpoint | None = None

    def check(self, row: dict[str, Any]) -> None:
        """Raise ValueError if the row lacks a field of the prompt, or if the field has a name of its own use."""
        for name in _fields(self.prompt):
            if name in ("call", "metrics", "policy", "tools"):
                raise ValueError(f"cannot fill {{{name}}}, a name of its own; rename the field by data.columns")
        if missing := [name for name in _fields(self.prompt) if name not in row]:
            raise ValueError(f"fills {{{missing[0]}}} of its prompt from the row, which lacks it")

    async def __call__(
        self, call: Call, metrics: dict[str, float], policy: Policy | None, tools: Sequence[ToolSpec], **row: Any
    ) -> AsyncGenerator[Any, str]:
        situation = self.prompt.format(**row)
        ends = [self.done] if isinstance(self.done, str) else self.done
        messages: list[Message] = [
            {"role": "system", "content": self.guidelines.format(situation=situation, done=ends[0])},
            {"role": "user", "content": GREETING},
        ]
        said: str | None = None
        if (asked := _last_words(row)) is not None:
            messages.append({"role": "assistant", "content": asked})
            said = yield None
        while True:
            if said is not None:
                # an empty turn of the agent is a message, too
                messages.append({"role": "user", "content": said or "(no answer)"})
            text = await self._write(messages, call, metrics, partial(self._ask, policy, tools))
            words, *ended = re.split("|".join(map(re.escape, ends)), text, maxsplit=1)
            if ended:
                yield finish(words.strip() or None)
                return
            if said is not None and text.strip() == said.strip():
                raise UserError(f"the user's model repeated the agent's words: {text!r:.200}")
            said = yield text

    async def _write(self, messages: list[Message], call: Call, metrics: dict[str, float], ask: Call) -> str:
        """Append the user's next message to `messages`, after its tool calls and their results, and return it."""
        for _ in range(MOST_CALLS):
            answer: ChatAnswer = await ask(messages)
            metrics["tokens"] += answer.length or 0
            if self.prices is not None and answer.length is not None and answer.sampled is not None:
                read, written = (answer.length - answer.sampled, answer.sampled)
                metrics["cost"] += (read * self.prices[0] + written * self.prices[1]) / 1e6
            taken = {made["id"] for message in messages for made in message.get("tool_calls") or []}
            parsed = read_answer(answer.message, NativeParser(), len(taken), [], taken)
            # servers without a reasoning parser leave it in the text
            text = split_reasoning(text_of(parsed.message["content"]), opened=False)[2].strip()
            if answer.cut:
                raise UserError(f"the user's model wrote more than max_tokens={self.max_tokens}: {text[:200]!r}")
            messages.append({**parsed.message, "content": text})
            if not parsed.calls:
                if not text or parsed.error:
                    raise UserError(f"the user's model wrote {parsed.error or 'nothing'}")
                return text
            for made in parsed.calls:
                result = await call(made.name, **made.arguments)
                messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
        raise UserError(f"the user's model called tools in {MOST_CALLS} turns in a row, and said nothing")

    async def _ask(self, policy: Policy | None, tools: Sequence[ToolSpec], messages: list[Message]) -> ChatAnswer:
        if self.url is None:
            if policy is None:
                raise UserError("there is no trained model here; fix: set rollout.user.options.url and model")
            return await policy(messages, self.temperature, self.max_tokens)
        try:
            if self._endpoint is None:
                endpoint = ChatEndpoint(self.url, self.model, self.api_key_env, self.retry_seconds, self.parameters)
                self._endpoint = await endpoint.__aenter__()
            return await self._endpoint.ask(messages, tools, self.temperature, self.max_tokens)
        except (InferenceError, ServerUnreachableError) as error:
            raise UserError(f"the user's model: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        if self._endpoint is not None:
            await self._endpoint.__aexit__(None, None, None)


def _fields(text: str) -> list[str]:
    """Return the names in braces. Raise ValueError if braces do not match, or for what is not a name."""
    names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"{{{name}}} is not the name of a field")
    return names


def _last_words(row: dict[str, Any]) -> str | None:
    """Return the row's last message if it is the user's."""
    if "messages" not in row:
        return str(row["question"])
    last = row["messages"][-1]
    return text_of(last["content"]) if last["role"] == "user" else None


def policy_of(runner: Runner, episode: Episode) -> Policy | None:
    """Return the trained model of a chain; None if a chat endpoint plays the agent."""
    if not isinstance(runner, ChainRunner):
        return None
    renderer, requests = runner.renderer, itertools.count()

    async def answer(messages: list[Message], temperature: float, most: int) -> ChatAnswer:
        # a seed of its own, or it would repeat the agent's choices
        sampling = replace(episode.sampling, temperature=temperature, seed=f"{episode.sampling.seed}/user")
        ids = renderer.open(messages, [])
        completion = await runner.sampler.sample(ids, sampling, next(requests), most)
        sampled = len(completion.token_ids)
        return ChatAnswer(
            renderer.parse_text(completion.token_ids).message, completion.cut, sampled, len(ids) + sampled
        )

    return answer

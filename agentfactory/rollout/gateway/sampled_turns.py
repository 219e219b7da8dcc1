"""Sampling of requested turns, each after the token ids of the sampled turns that its conversation repeats."""

import asyncio
import logging
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any

from agentfactory.base.run_notices import notify
from agentfactory.rollout.chains.opening_prompt import MOST_CHARACTERS
from agentfactory.rollout.chains.sampling import Sampler, Sampling
from agentfactory.rollout.gateway.request_bodies import most_bytes
from agentfactory.rollout.gateway.request_options import Refusal, Reply, TurnRequest, assistant, too_long, wrong
from agentfactory.rollout.gateway.turn_tree import ChainTree, Delivered, Node, Plan, content_text
from agentfactory.rollout.inference.http_transport import ContextOverflowError, InferenceError, ServerUnreachableError
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.text.renderer import Parsed, Renderer
from agentfactory.rollout.text.stop_strings import find_stop, tokens_of
from agentfactory.rollout.text.templates import RenderError
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import StopReason

logger = logging.getLogger(__name__)

_PAGE = "docs/own-agents.md"


@dataclass(frozen=True)
class SampledTurn:
    """A sampled turn, as recorded in the rows and as returned to the agent."""

    completion: Completion
    parsed: Parsed
    node: Node
    reply: Reply


class RequestedTurns:
    """A sampler of the turns of one chain or conversation, which are appended to `rows` of at most `longest` tokens."""

    def __init__(self, rows: list[Row], renderer: Renderer, sampler: Sampler, longest: int, name: str = "") -> None:
        self.name = name
        self.tree = ChainTree(rows, renderer)
        self.counts: Counter[str] = Counter()
        """Metrics of the gateway."""
        self.last = StopReason.ANSWER
        """The stop reason of the chain if no further turn is requested."""
        self._renderer = renderer
        self._images = renderer.images
        self._sampler = sampler
        self._longest = longest
        self.most_bytes = most_bytes(longest, renderer.images)
        """Maximum size of a request's body."""
        self._requested = 0
        """Number of turns requested so far, including failed ones: each has its own seed."""
        self.calls = 0
        """Number of tool calls that the model made so far, including the agent's own tools."""

    def check(self, turn_request: TurnRequest) -> None:
        """Warn about parameters of a request that are not applied. Raise Refusal if its turns cannot be sampled."""
        for name, value in turn_request.unmet.items():
            self.counts["gateway/unmet_parameters"] += 1
            told = f"an agent requests {name}={str(value)[:80]}, which is not applied; the recipe's settings hold; "
            told += "fix: remove it from the agent's requests, or set it in the recipe's `rollout:`"
            notify(logger, f"agents ask for {name}", told, see=_PAGE)
        if turn_request.messages[-1]["role"] == "assistant":
            raise wrong("messages: the last one is an assistant's; continuing an assistant message is not supported")

    async def plan(self, turn_request: TurnRequest) -> Plan:
        """Render a conversation. Raise Refusal if it is too long or the chat template refuses it."""
        try:
            given = [*turn_request.messages, *(spec.to_openai() for spec in turn_request.specs)]
            # rendering a hundred megabytes would block all chains of the process
            if (characters := _characters(given)) > MOST_CHARACTERS * self._longest:
                raise self.overflow(f"{characters} characters")
            messages = await self._images.take_messages(turn_request.messages)
            return self.tree.plan(messages, turn_request.specs, turn_request.session)
        except (RenderError, TypeError, ValueError, RecursionError) as error:
            raise wrong(f"messages: {error}") from error

    def room(self, plan: Plan) -> int:
        """Return the maximum number of tokens of the turn. Raise Refusal if no token is left."""
        if (room := self._longest - len(plan.ids)) < 1:
            raise self.overflow(f"{len(plan.ids)} tokens")
        return room

    async def sample(self, turn_request: TurnRequest, plan: Plan, sampling: Sampling, most: int) -> list[SampledTurn]:
        """Sample the requested turns, of at most `most` tokens each. Raise Refusal if they do not fit the server's
        context, InferenceError or ServerUnreachableError."""

        async def complete() -> Completion:
            self._requested += 1
            return await self._sampler.sample(
                plan.ids, sampling, self._requested, most, images=plan.images, stops=turn_request.stop
            )

        try:
            completions = await asyncio.gather(*(complete() for _ in range(turn_request.choices)))
        except ContextOverflowError as error:
            raise self.overflow(str(error)) from error
        self.counts["gateway/spliced_turns"] += plan.spliced
        for message in plan.unmatched:
            self.counts["gateway/unmatched_turns"] += 1
            text = content_text(message.get("content")) or str(message.get("tool_calls"))
            told = f"an agent sent an assistant message that was not sampled: {text[:80]!r}; it is not trained; "
            told += "fix: let the agent send the model's messages back as it got them"
            notify(logger, "assistant messages of agents", told, see=_PAGE)
        turns = [self._take(turn_request, plan, completion) for completion in completions]
        turn_request.remember([turn.reply for turn in turns])
        return turns

    def _take(self, turn_request: TurnRequest, plan: Plan, completion: Completion) -> SampledTurn:
        ids, stop = completion.token_ids, None
        if (found := find_stop(self._renderer.decode(ids), turn_request.stop)) is not None:
            # The tokens after the one that completes a stop string are discarded. The end depends only on the tokens
            # before it, so the logprobs of the remaining tokens stay correct.
            at, stop = found
            completion = completion.beginning(tokens_of(at + len(stop), ids, self._renderer.decode))
            ids = completion.token_ids
        if turn_request.specs:
            parsed = self._renderer.parse(ids, self.calls, specs=turn_request.specs)
        else:
            parsed = self._renderer.parse_text(ids)
        self.calls += len(parsed.calls)
        whole = ""
        if stop is not None and parsed.error is None and not parsed.calls:
            whole = content_text(parsed.message["content"])
            parsed.message["content"] = whole.partition(stop)[0]
        calls, text = self.tree.name_calls(parsed.calls), content_text(parsed.message["content"])
        reasoning = parsed.message.get("reasoning_content") or ""
        shown = assistant(text, [(call.id, call.name, call.arguments) for call in calls], reasoning)
        node = self.tree.record(plan, completion, parsed, Delivered.of(shown, stop, whole))
        self.last = StopReason.MAX_TOKENS if completion.cut and not calls else StopReason.ANSWER
        asked = zip(ids, completion.logprobs, strict=True) if turn_request.options.get("logprobs") else ()
        logprobs = [(self._renderer.decode([token]), logprob) for token, logprob in asked]
        name, cut, prompt = secrets.token_hex(12), completion.cut, len(plan.ids)
        reply = Reply(name, text, reasoning, calls, cut, stop, prompt, len(ids), logprobs)
        return SampledTurn(completion, parsed, node, reply)

    def overflow(self, problem: str) -> Refusal:
        """Return the refusal of a conversation that does not fit the context."""
        self.last = StopReason.CONTEXT_OVERFLOW
        return too_long(self._longest, problem)


def unavailable(error: InferenceError | ServerUnreachableError) -> Refusal:
    """Return the refusal of a request whose turns could not be sampled, with status 503."""
    return Refusal(503, "inference_error", str(error))


def _characters(value: Any) -> int:
    match value:
        case str():
            return len(value)
        case list():
            return sum(map(_characters, value))
        case {"type": "image_url"}:
            return 0
        case dict():
            return sum(map(_characters, value.values())) + len(value)
    return 1

"""Answers the requests of one chain: each is a turn, sampled after the ids of the turns that it repeats."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable
from typing import Any

from agentfactory.rollout.chains.episode import Episode, Setup
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.data import Task
from agentfactory.rollout.gateway.content import assistant
from agentfactory.rollout.gateway.message_equality import Delivered, content_text
from agentfactory.rollout.gateway.request_options import Asked, Refusal, Said, foreign_key, wrong
from agentfactory.rollout.gateway.responses import Stored
from agentfactory.rollout.gateway.turn_tree import ChainTree, Plan
from agentfactory.rollout.inference.connection import ContextOverflowError, InferenceError, ServerUnreachableError
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.text.renderer import Parsed
from agentfactory.rollout.text.stop_strings import find_stop, tokens_of
from agentfactory.rollout.text.templates import RenderError
from agentfactory.rollout.trajectory import Activity, StopReason, Trajectory
from agentfactory.tools.calls.run_notices import tell
from agentfactory.tools.messages import CallError

logger = logging.getLogger(__name__)

_PAGE = "docs/own-agents.md"
_MOST_CHARACTERS = 64
"""Characters per token of a conversation that is not even rendered. No text has so many."""


class AskedTurns(Episode):
    """A chain whose turns are asked for by requests (server.Asking)."""

    def __init__(self, setup: Setup, trajectory: Trajectory, task: Task, sampling: Sampling) -> None:
        super().__init__(setup, trajectory, task, sampling)
        self.tree = ChainTree(trajectory.rows, setup.renderer)
        self.temperature = sampling.temperature
        self.stored = Stored()
        self._ended: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        self._taken = 0
        """Turns that were sampled or are being sampled."""
        self._asked = 0
        """Turns that were ever asked for: each has seeds of its own."""
        self._requests: set[asyncio.Task[Any]] = set()
        """Those that are being sampled."""
        self._closed = False
        """Whether the chain is over: nothing is added to its rows any more."""
        self._calls = 0
        """Calls that the model has made so far, of whatever tools the agent has."""
        self._last: StopReason = StopReason.ANSWER
        """Why the chain ends if the agent asks for nothing more."""

    async def admit(self, asked: Asked) -> Awaitable[list[Said]]:
        """See server.Asking: render the conversation, and check that it has room for a turn."""
        self._tell_unmet(asked)
        if asked.messages[-1]["role"] == "assistant":
            raise wrong("messages: the last one is an assistant's; turns that a client begins cannot be sampled")
        left = self.config.max_turns - self._taken
        if self._ended.done() or left < asked.choices:
            self._end(StopReason.MAX_TURNS)
            raise Refusal(400, "max_turns", f"the chain has rollout.max_turns={self.config.max_turns} turns")
        plan = await self._plan(asked)
        room = self.config.max_total_tokens - len(plan.ids)
        if room < 1:
            raise self._overflow(f"{len(plan.ids)} tokens")
        self._taken += asked.choices
        most = min(room, self.config.max_tokens, asked.max_tokens or self.config.max_tokens)
        return self._sample(asked, plan, most)

    async def count(self, asked: Asked) -> int:
        """See server.Asking."""
        return len((await self._plan(asked)).ids)

    async def _plan(self, asked: Asked) -> Plan:
        try:
            characters = sum(map(_characters, [*asked.messages, *(spec.to_openai() for spec in asked.specs)]))
            # a hundred megabytes would keep all chains of the process waiting while they are rendered
            if characters > _MOST_CHARACTERS * self.config.max_total_tokens:
                raise self._overflow(f"{characters} characters")
            messages = await self._seen(asked.messages)
            return self.tree.plan(messages, asked.specs, asked.session)
        except (RenderError, TypeError, ValueError, RecursionError) as error:
            raise wrong(f"messages: {error}") from error

    async def _sample(self, asked: Asked, plan: Plan, most: int) -> list[Said]:
        if self._closed:  # since the request was admitted
            raise foreign_key()
        request = asyncio.current_task()
        assert request is not None
        self._requests.add(request)
        start = time.monotonic()
        try:
            samples = [self._complete(asked, plan, most) for _ in range(asked.choices)]
            completions = await asyncio.gather(*samples)
        except ContextOverflowError as error:
            self._taken -= asked.choices
            raise self._overflow(str(error)) from error
        except (InferenceError, ServerUnreachableError) as error:
            self._fail(error)
            raise Refusal(503, "inference_error", str(error)) from error
        except asyncio.CancelledError:
            self._taken -= asked.choices
            raise
        finally:
            self._requests.discard(request)
        end = time.monotonic()
        self._note_unmatched(plan)
        self.trajectory.messages += plan.given
        turns = []
        for completion in completions:
            self.timeline.note(Activity.MODEL, start, end, self.trajectory.turns)
            turns.append(self._take(asked, plan, completion))
        asked.remember(turns)
        return turns

    async def _complete(self, asked: Asked, plan: Plan, most: int) -> Completion:
        self._asked += 1
        sampling = self._sampling(asked)
        return await self.setup.sampler.sample(
            plan.ids, sampling, self._asked, most, images=plan.images, stops=asked.stop
        )

    def _sampling(self, asked: Asked) -> Sampling:
        """Return how to sample the turns of a request: as the recipe says."""
        return self.sampling

    def _take(self, asked: Asked, plan: Plan, completion: Completion) -> Said:
        """Put a sampled turn into the rows, and return it for the agent."""
        completion, stop = self._stopped(completion, asked.stop)
        ids = completion.token_ids
        if asked.specs:
            parsed = self.renderer.parse(ids, self._calls, specs=asked.specs)
        else:
            parsed = self.renderer.parse_text(ids)
        whole = ""
        if stop is not None and parsed.error is None and not parsed.calls:
            whole = content_text(parsed.message["content"])
            parsed.message["content"] = whole.partition(stop)[0]
        calls, text = self.tree.name_calls(parsed.calls), content_text(parsed.message["content"])
        reasoning = parsed.message.get("reasoning_content") or ""
        shown = assistant(text, [(call.id, call.name, call.arguments) for call in calls], reasoning)
        node = self.tree.record(plan, completion, parsed, Delivered.of(shown, stop, whole))
        self.trajectory.note_turn()
        self.trajectory.messages.append(parsed.message)
        self.counts["truncated_turns"] += completion.cut
        self._note(parsed, node.number)
        self._last = StopReason.MAX_TOKENS if completion.cut and not calls else StopReason.ANSWER
        return Said(
            secrets.token_hex(12),
            text,
            reasoning,
            calls,
            completion.cut,
            stop,
            len(plan.ids),
            len(ids),
            [
                (self.renderer.decode([token]), logprob)
                for token, logprob in zip(ids, completion.logprobs, strict=True)
                if asked.options.get("logprobs")
            ],
        )

    def _note(self, parsed: Parsed, number: int) -> None:
        self._calls += len(parsed.calls)
        if parsed.error is not None:
            self.counts[CallError.MALFORMED_CALL] += 1
            self.trajectory.malformed_turns.append(number)

    def _stopped(self, completion: Completion, stops: tuple[str, ...]) -> tuple[Completion, str | None]:
        """End a turn with the token that completes a stop string; the tokens after it are in no row. Whether a turn
        ends there depends only on the tokens before, so that the log-probabilities of the others are right."""
        ids = completion.token_ids
        text = self.renderer.decode(ids)
        found = find_stop(text, stops)
        if found is None:
            return completion, None
        at, stop = found
        return completion.beginning(tokens_of(at + len(stop), ids, self.renderer.decode)), stop

    def _overflow(self, problem: str) -> Refusal:
        self._last = StopReason.CONTEXT_OVERFLOW
        most = self.config.max_total_tokens
        text = f"This model's maximum context length is {most} tokens; the conversation leaves no room: {problem}"
        return Refusal(400, "context_length_exceeded", text)

    def _close(self) -> None:
        """End the requests that are being sampled, and take no more."""
        self._closed = True
        for request in self._requests:
            request.cancel()

    def _end(self, reason: StopReason) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    def _fail(self, error: Exception) -> None:
        """End the chain, whatever its agent would do."""
        if not self._ended.done():
            self._ended.set_exception(error)

    def _tell_unmet(self, asked: Asked) -> None:
        for name, value in asked.unmet.items():
            self.counts["gateway/unmet_parameters"] += 1
            told = f"an agent asks for {name}={str(value)[:80]}, and gets what the recipe says"
            tell(logger, f"agents ask for {name}", told, see=_PAGE)

    def _note_unmatched(self, plan: Plan) -> None:
        self.counts["gateway/spliced_turns"] += plan.spliced
        for message in plan.unmatched:
            self.counts["gateway/unmatched_turns"] += 1
            text = content_text(message.get("content")) or str(message.get("tool_calls"))
            told = f"an agent sends back an assistant message that was not sampled: {text[:80]!r}; it is context"
            tell(logger, "assistant messages of agents", told, see=_PAGE)


def _characters(value: Any) -> int:
    """Return the length of all texts in a message or a tool, without its images."""
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

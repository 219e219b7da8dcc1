"""Limits on a chain's use of tools: checked before each call in the order of `config.Limit`, while it runs, and on its
result; see docs/limits.md. `Rates` and `ChainAccount` are pure; `ChainLimits` runs calls."""

import asyncio
import difflib
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace

from agentfactory.base.config import BreachConfig, Limit, LimitsConfig
from agentfactory.base.errors import SettingError, plural
from agentfactory.base.messages import CallError, Content, Message, ToolCall, ToolResult
from agentfactory.tools.calls.truncation import Cut, truncated


@dataclass(frozen=True)
class Deadline:
    """The end of a part of a chain, as a time of the event loop, and the setting with its value that defines it."""

    until: float
    setting: str

    @classmethod
    def after(cls, seconds: float, setting: str) -> "Deadline":
        return cls(asyncio.get_running_loop().time() + seconds, f"{setting}={seconds:g}")


def check_limits(config: LimitsConfig, names: Collection[str]) -> None:
    """Raise ValueError if `config` limits a tool that is not among `names`, the names of all tools that are served."""
    for field in ("calls_per_tool", "cost_per_call", "calls_per_second", "seconds_per_call"):
        for name in getattr(config, field):
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                fix = f"did you mean {close[0]}?" if close else f"the tools are {', '.join(names) or 'none'}"
                raise SettingError(f"limits.{field}.{name}", f"there is no tool {name!r}", fix)


class Rates:
    """A rate limiter per tool, for all chains of a process: for a rate n, at most floor(n) calls begin in any floor(n)
    / n seconds (below 1: one in 1 / n seconds), in the order of their requests."""

    def __init__(self, per_second: dict[str, float]) -> None:
        self._windows: dict[str, float] = {}  # tool -> seconds over which its remembered calls must be spread
        self._starts: dict[str, deque[float]] = {}
        for name, rate in per_second.items():
            count = max(1, int(rate))
            self._windows[name] = count / rate
            self._starts[name] = deque(maxlen=count)

    def wait(self, tool: str, now: float) -> float:
        """Return the seconds until a call of `tool` may begin; 0 if it may begin immediately."""
        starts = self._starts.get(tool)
        if starts is None or len(starts) < (starts.maxlen or 0):
            return 0.0
        return max(0.0, starts[0] + self._windows[tool] - now)

    def take(self, tool: str, now: float) -> float:
        """Reserve the next free time for a call of `tool`; return the seconds until then."""
        wait = self.wait(tool, now)
        if tool in self._starts:
            self._starts[tool].append(now + wait)
        return wait


class ChainAccount:
    """The usage of one chain's limits: `breaches`, `cost` in the unit of `cost_per_call`,
    `seconds` in calls, `waited` seconds for rates, and `stopped`, the limit that ends the chain."""

    def __init__(self, config: LimitsConfig, rates: Rates, cut: Cut | None = None) -> None:
        if config.result_tokens is not None and cut is None:
            problem = "results are counted in tokens, and there is no tokenizer here"
            raise SettingError("limits.result_tokens", problem, "set null")
        self.config = config
        self.breaches: Counter[Limit] = Counter()
        self.stopped: Limit | None = None
        self.cost = 0.0
        self.seconds = 0.0
        self.waited = 0.0
        self._rates = rates
        self._cut = cut
        self._calls: Counter[str] = Counter()
        self._images = 0
        self._running = 0
        self._since = 0.0  # when the first of the running calls began
        self._time_over = False  # a call was cancelled; the sum of seconds may lag behind the timer by a rounding error

    def admit(self, call: ToolCall, place: int, now: float) -> ToolResult | float:
        """Count a call, the `place`-th of its turn, and return the seconds that it must wait, or its refusal."""
        config, name = self.config, call.name
        if self.stopped is not None:
            return self._refuse_late()
        made, most = self._calls.total(), config.calls_per_tool.get(name)
        price = config.cost_per_call.get(name, 0.0)
        rate = config.calls_per_second.get(name)
        if config.calls_per_turn is not None and place >= config.calls_per_turn:
            reached = f"{plural(config.calls_per_turn, 'call')} in one turn"
            return self._refuse(Limit.CALLS_PER_TURN, reached, "The call can be made in your next turn.")
        if config.calls is not None and made >= config.calls:
            return self._refuse(Limit.CALLS, f"{plural(config.calls, 'call')} in this conversation", _ANSWER)
        if most is not None and self._calls[name] >= most:
            reached = f"{plural(most, 'call')} of {name} in this conversation"
            return self._refuse(Limit.CALLS_PER_TOOL, reached, f"Go on without {name}.")
        # prices are added up as floats: 3 x 0.1 must fit into 0.3
        if config.cost is not None and price and self.cost + price > config.cost * (1 + 1e-9):
            left = max(0.0, config.cost - self.cost)
            text = f"Not run: {name} costs {price:g}, and of the limit of {config.cost:g} only {left:g} is left."
            return ToolResult(self._breach(Limit.COST, text, f"Go on without {name}."), CallError.LIMIT)
        if self._is_time_over(now):
            return self._refuse(Limit.TOOL_SECONDS, self._all_seconds, _ANSWER)
        if Limit.CALLS_PER_SECOND in config.on_breach and rate is not None and self._rates.wait(name, now) > 0:
            reached = f"{rate:g} calls of {name} per second"
            return self._refuse(Limit.CALLS_PER_SECOND, reached, "The call can be made in your next turn.")
        self._calls[name] += 1
        self.cost += price
        wait = self._rates.take(name, now)
        self.waited += wait
        return wait

    def begin(self, now: float) -> float | None:
        """Note that a call begins; return the seconds of `tool_seconds` that are left (None: no limit)."""
        left = None if self.config.tool_seconds is None else self.config.tool_seconds - self._seconds_until(now)
        if not self._running:
            self._since = now
        self._running += 1
        return left

    def end(self, now: float) -> None:
        self._running -= 1
        if not self._running:
            self.seconds += now - self._since

    def settle(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """Return the result for the model of a call that ended normally, or by the time limit of one call."""
        limit, most = self.config.seconds_per_call.get(call.name), self.config.result_tokens
        if result.error is CallError.TIMEOUT and limit is not None:
            text = f"Stopped: the limit of {limit:g} s for one call of {call.name} is reached."
            return replace(result, content=self._breach(Limit.SECONDS_PER_CALL, text, "Try one that takes less time."))
        if result.left_out:
            self._breach(Limit.RESULT_BYTES, "", "")
        if most is not None and (shorter := truncated(result.content, most, self._cut)) is not None:
            if not result.left_out:
                self._breach(Limit.RESULT_TOKENS, "", "")
            result = replace(result, content=shorter)
        content = self._settle_images(result.content)
        return result if content is result.content else replace(result, content=content)

    def settle_message(self, message: Message) -> Message:
        """Apply the limit of images to a message that no call returned."""
        content = message.get("content")
        return {**message, "content": self._settle_images(content)} if isinstance(content, list) else message

    def _settle_images(self, content: Content) -> Content:
        if isinstance(content, str):
            return content
        room = math.inf if self.config.images is None else self.config.images - self._images
        places = [place for place, part in enumerate(content) if part["type"] == "image_url"]
        self._images += len(places)
        if len(places) <= room:
            return content
        most = plural(self.config.images or 0, "image")
        text = f"Image not shown: the limit of {most} in this conversation is reached."
        told = {"type": "text", "text": self._breach(Limit.IMAGES, text, "Go on without it.")}
        left_out = places[max(0, int(room)) :]
        return [told if place in left_out else part for place, part in enumerate(content)]

    def settle_cut(self, seconds: float) -> ToolResult:
        """Return the result for the model of a call cancelled after `seconds`, when `tool_seconds` were over."""
        self._time_over = True
        text = f"Stopped: the limit of {self._all_seconds} is reached."
        return ToolResult(self._breach(Limit.TOOL_SECONDS, text, _ANSWER), CallError.LIMIT, seconds)

    def metrics(self) -> dict[str, float]:
        breaches: dict[str, float] = {f"limits/{limit}": self.breaches[limit] for limit in Limit}
        return breaches | {"tool_seconds": self.seconds, "tool_cost": self.cost, "tool_wait_seconds": self.waited}

    @property
    def _all_seconds(self) -> str:
        return f"{self.config.tool_seconds:g} s for all calls of this conversation"

    def _seconds_until(self, now: float) -> float:
        return self.seconds + (now - self._since if self._running else 0.0)

    def _is_time_over(self, now: float) -> bool:
        if self.config.tool_seconds is None:
            return False
        return self._time_over or self._seconds_until(now) >= self.config.tool_seconds

    def _refuse(self, limit: Limit, reached: str, advice: str) -> ToolResult:
        text = f"Not run: the limit of {reached} is reached."
        return ToolResult(self._breach(limit, text, advice), CallError.LIMIT)

    def _refuse_late(self) -> ToolResult:
        return ToolResult(f"Not run: the limit {self.stopped} ended the conversation.", CallError.LIMIT)

    def _breach(self, limit: Limit, text: str, advice: str) -> str:
        breach = self.config.on_breach.get(limit, BreachConfig())
        self.breaches[limit] += 1
        if breach.action == "tell":
            return f"{text} {advice}"
        self.stopped = self.stopped or limit
        return f"{text} The conversation ends here."


class ChainLimits(ChainAccount):
    async def run(
        self, calls: list[ToolCall], call: Callable[[ToolCall, float | None], Awaitable[ToolResult]]
    ) -> list[ToolResult]:
        """Run a turn's calls concurrently, each by `call` within the given seconds; one that raises ends the others."""
        if len(calls) == 1:
            return [await self._run(calls[0], 0, call)]
        tasks = [asyncio.create_task(self._run(one, place, call)) for place, one in enumerate(calls)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            if not all(task.done() for task in tasks):
                for task in tasks:
                    if not task.cancelling():  # a second cancellation would interrupt the call's clean-up
                        task.cancel()
                await asyncio.wait(tasks)

    async def _run(
        self, call: ToolCall, place: int, make: Callable[[ToolCall, float | None], Awaitable[ToolResult]]
    ) -> ToolResult:
        admitted = self.admit(call, place, time.monotonic())
        if isinstance(admitted, ToolResult):
            return admitted
        if admitted:
            await asyncio.sleep(admitted)
            if self.stopped is not None:
                return self._refuse_late()
            if self._is_time_over(time.monotonic()):
                return self._refuse(Limit.TOOL_SECONDS, self._all_seconds, _ANSWER)
        started = time.monotonic()
        left = self.begin(started)
        try:
            async with asyncio.timeout(left) as limit:
                result = await make(call, self.config.seconds_per_call.get(call.name))
        except TimeoutError:
            if not limit.expired():
                raise
            return self.settle_cut(time.monotonic() - started)
        finally:
            self.end(time.monotonic())
        return self.settle(call, result)


_ANSWER = "Answer with what you have."

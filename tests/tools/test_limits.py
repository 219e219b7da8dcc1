"""Tests of limits: refusals, cuts and waits, their order and texts; with a fake clock, and with real calls."""

import asyncio
import re
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentfactory.base.config import Limit, LimitsConfig
from agentfactory.base.messages import CallError, Content, ToolCall, ToolResult
from agentfactory.tools.calls import limits
from agentfactory.tools.calls.limits import ChainAccount, ChainLimits, Rates, check_limits
from tests.conftest import REPOSITORY
from tests.waiting import pass_time, settle

WORDS = "one two three four five six"
SEARCH, ANOTHER = ("search", 0, 0.0), ("another", 0, 0.0)
OF_SEARCH = "2 calls of search in this conversation"


def cut(text: str, most: int) -> str | None:
    words = text.split(" ")
    return None if len(words) <= most else " ".join(words[: most - 1]) + " [...]"


def account(**fields: object) -> ChainAccount:
    config = LimitsConfig.model_validate(fields)
    return ChainAccount(config, Rates(config.calls_per_second), cut)


def call(name: str = "search") -> ToolCall:
    return ToolCall("call_0", name, {})


def take(chain: ChainAccount, name: str = "search", place: int = 0, now: float = 0.0) -> Content:
    """Make a call that takes no time; return the content for the model."""
    admitted = chain.admit(call(name), place, now)
    if isinstance(admitted, ToolResult):
        assert admitted.error is CallError.LIMIT
        return admitted.content
    assert admitted == 0
    chain.begin(now)
    chain.end(now)
    return chain.settle(call(name), ToolResult("fine")).content


def breached(chain: ChainAccount) -> dict[str, float]:
    found = {name: value for name, value in chain.metrics().items() if name.startswith("limits/") and value}
    assert Counter({limit: found.get(f"limits/{limit}", 0) for limit in Limit}) == chain.breaches
    return found


LATER = "The call can be made in your next turn."
RARELY = {"calls_per_second": {"search": 0.5}, "on_breach": {"calls_per_second": {}}}


@pytest.mark.parametrize(
    ("fields", "made", "refused", "reached", "advice"),
    [
        ({"calls_per_turn": 2}, [SEARCH, ("search", 1, 0.0)], [("search", 2, 0.0)], "2 calls in one turn", LATER),
        ({"calls": 1}, [SEARCH], [ANOTHER] * 2, "1 call in this conversation", "Answer with what you have."),
        ({"calls_per_tool": {"search": 2}}, [SEARCH, ANOTHER, SEARCH], [SEARCH], OF_SEARCH, "Go on without search."),
        (RARELY, [SEARCH], [("search", 0, 1.9)], "0.5 calls of search per second", LATER),
    ],
)
def test_a_refusal(fields: dict[str, Any], made: list[Any], refused: list[Any], reached: str, advice: str) -> None:
    chain = account(**fields)
    assert [take(chain, *call) for call in made] == ["fine"] * len(made)
    said = f"Not run: the limit of {reached} is reached. {advice}"
    assert [take(chain, *call) for call in refused] == [said] * len(refused)
    assert breached(chain) == {f"limits/{next(iter(fields))}": len(refused)}
    # its next turn, another tool, or later
    assert (take(chain, "other", 0, 2.0) == "fine") == ("calls" not in fields)


def test_cost() -> None:
    chain = account(cost=0.3, cost_per_call={"search": 0.1, "ask": 0.25})
    assert take(chain, "ask") == "fine"
    said = "Not run: search costs 0.1, and of the limit of 0.3 only 0.05 is left. Go on without search."
    assert take(chain) == said
    assert take(chain, "free") == "fine"
    assert chain.metrics()["tool_cost"] == 0.25
    assert breached(chain) == {"limits/cost": 1}
    chain = account(cost=0.3, cost_per_call={"search": 0.1})
    assert [take(chain) for _ in range(3)] == ["fine"] * 3, "0.1 + 0.1 + 0.1 is 0.3, as people write it"
    assert take(chain) != "fine"


def test_tool_seconds_during_calls_that_run_side_by_side() -> None:
    chain = account(tool_seconds=5)
    for start, left in ((10, 5), (12, 3), (13, 2)):
        assert chain.admit(call(), 0, start) == 0
        assert chain.begin(start) == left, "they end together, when the time is over"
    chain.end(12.5)
    chain.end(14)
    assert chain.admit(call(), 3, 14.9) == 0
    assert isinstance(chain.admit(call(), 3, 15), ToolResult), "also while one still runs"
    chain.end(15)
    assert chain.seconds == 5
    result = chain.settle_cut(4.0)
    said = "Stopped: the limit of 5 s for all calls of this conversation is reached. Answer with what you have."
    assert (result.content, result.error, result.seconds) == (said, CallError.LIMIT, 4.0)
    assert breached(chain) == {"limits/tool_seconds": 2}


def test_calls_per_second_wait_for_their_time() -> None:
    config = LimitsConfig(calls_per_second={"search": 2})
    rates = Rates(config.calls_per_second)
    chains = [ChainAccount(config, rates) for _ in range(5)]
    assert [chain.admit(call(), 0, 10) for chain in chains] == [0, 0, 1, 1, 2], "all chains share the rate"
    assert chains[0].admit(call("another"), 0, 10) == 0
    assert chains[4].metrics()["tool_wait_seconds"] == 2
    assert breached(chains[4]) == {}, "to wait is no breach"
    assert chains[0].admit(call(), 0, 13) == 0


@given(st.floats(0.1, 20), st.lists(st.floats(0, 2), min_size=1, max_size=60))
def test_rates_hold_in_every_window(rate: float, pauses: list[float]) -> None:
    rates, now, starts = Rates({"search": rate}), 0.0, []
    for pause in pauses:
        now += pause
        starts.append(now + rates.take("search", now))
    # except for the rounding of sums
    assert all(later >= first - 1e-9 for first, later in pairwise(starts)), "first asked, first served"
    count = max(1, int(rate))
    for first, later in zip(starts, starts[count:], strict=False):
        assert later - first >= count / rate - 1e-9
    for index, start in enumerate(starts):
        asked = sum(pauses[: index + 1])
        earliest = starts[index - count] + count / rate if index >= count else 0.0
        assert start <= max(asked, earliest) + 1e-9, "nobody waits longer than the rate asks"


def test_result_tokens() -> None:
    chain = account(result_tokens=4)
    assert chain.settle(call(), ToolResult("one two three four")).content == "one two three four"
    result = chain.settle(call(), ToolResult(WORDS, None, 0.1, finish=True, info={"pages": 3}))
    assert result == ToolResult("one two three [...]", None, 0.1, finish=True, info={"pages": 3})
    assert breached(chain) == {"limits/result_tokens": 1}
    first, second = ({"type": "text", "text": text} for text in ("one two three four", "five six"))
    parts: Content = [IMAGE, first, IMAGE, second]
    result = chain.settle(call(), ToolResult(parts))
    assert result.content == [IMAGE, {"type": "text", "text": "one two three [...]"}, IMAGE], "the texts together"
    assert chain.settle(call(), ToolResult([IMAGE])).content == [IMAGE]
    with pytest.raises(ValueError, match=r"limits\.result_tokens: .*tokenizer"):
        ChainAccount(chain.config, Rates({}))


IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BREACHES: dict[Limit, dict[str, object]] = {
    Limit.CALLS_PER_TURN: {"calls_per_turn": 1},
    Limit.CALLS: {"calls": 1},
    Limit.CALLS_PER_TOOL: {"calls_per_tool": {"search": 1}},
    Limit.COST: {"cost": 1, "cost_per_call": {"search": 1}},
    Limit.TOOL_SECONDS: {"tool_seconds": 1},
    Limit.CALLS_PER_SECOND: {"calls_per_second": {"search": 1}},
    Limit.SECONDS_PER_CALL: {"seconds_per_call": {"search": 1}},
    Limit.RESULT_BYTES: {},
    Limit.RESULT_TOKENS: {"result_tokens": 4},
    Limit.IMAGES: {"images": 1},
}
"""Recipe fields of each limit, which the second call of `overdo` breaches."""


def overdo(chain: ChainAccount, limits: set[Limit]) -> ToolResult:
    """Make a call within the limits, then one that breaches every limit of `limits`."""
    chain.admit(call(), 0, 0.0)
    chain.begin(0.0)
    chain.end(1.0 if Limit.TOOL_SECONDS in limits else 0.0)
    admitted = chain.admit(call(), 1, 0.5)
    if isinstance(admitted, ToolResult):
        return admitted
    late = Limit.SECONDS_PER_CALL in limits
    left_out = 3 if Limit.RESULT_BYTES in limits else 0  # cut by the session when the result arrived
    content: Content = [{"type": "text", "text": WORDS}, IMAGE, IMAGE] if Limit.IMAGES in limits else WORDS
    return chain.settle(call(), ToolResult(content, CallError.TIMEOUT if late else None, left_out=left_out))


@pytest.mark.parametrize("limit", Limit)
def test_a_breach_stops_where_the_recipe_says_so(limit: Limit) -> None:
    told = account(**BREACHES[limit], on_breach={limit: {}})
    result = overdo(told, {limit})
    assert (breached(told), told.stopped) == ({f"limits/{limit}": 1}, None)
    assert "ends here" not in str(result.content)

    stopped = account(**BREACHES[limit], on_breach={limit: {"action": "stop"}})
    result = overdo(stopped, {limit})
    assert (breached(stopped), stopped.stopped) == ({f"limits/{limit}": 1}, limit)
    if limit is Limit.RESULT_TOKENS:
        assert result.content == "one two three [...]"
    elif limit is Limit.RESULT_BYTES:
        assert result.content == WORDS
    elif limit is Limit.IMAGES:
        text = "Image not shown: the limit of 1 image in this conversation is reached. The conversation ends here."
        assert result.content == [{"type": "text", "text": WORDS}, IMAGE, {"type": "text", "text": text}]
    else:
        assert str(result.content).endswith("reached. The conversation ends here.") or limit is Limit.COST
    later = stopped.admit(call("another"), 0, 100.0)
    assert later == ToolResult(f"Not run: the limit {limit} ended the conversation.", CallError.LIMIT)
    assert breached(stopped) == {f"limits/{limit}": 1}, "what comes after is no further breach"


@pytest.mark.parametrize("limit", Limit)
def test_the_limit_that_is_checked_first_counts(limit: Limit) -> None:
    later = list(Limit)[list(Limit).index(limit) :]
    fields = {name: value for other in later for name, value in BREACHES[other].items()}
    chain = account(**fields, on_breach={other: {} for other in later})
    overdo(chain, set(later))
    # a result whose text was cut may also have too many images
    also = {"limits/images": 1} if limit in (Limit.RESULT_BYTES, Limit.RESULT_TOKENS) else {}
    assert breached(chain) == {f"limits/{limit}": 1, **also}


def test_breaches_add_up_and_the_first_that_stops_is_the_reason() -> None:
    stop = {"action": "stop"}
    both = {"seconds_per_call": stop, "result_tokens": stop}
    chain = account(seconds_per_call={"slow": 1}, result_tokens=4, on_breach=both)
    late = ToolResult("", CallError.TIMEOUT)
    for name, result in (("fast", ToolResult(WORDS)), ("fast", ToolResult(WORDS)), ("slow", late)):
        chain.settle(call(name), result)  # they ran side by side
    assert breached(chain) == {"limits/seconds_per_call": 1, "limits/result_tokens": 2}
    assert chain.stopped is Limit.RESULT_TOKENS


def test_the_page_has_the_order_of_the_checks() -> None:
    page = (REPOSITORY / "docs" / "limits.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \d+ \| `limits\.(\w+)`", page, re.MULTILINE) == list(Limit)


# ---- the runner, with calls that take time to finish


def runner(**fields: object) -> ChainLimits:
    config = LimitsConfig.model_validate(fields)
    return ChainLimits(config, Rates(config.calls_per_second), cut)


def calls(*names: str) -> list[ToolCall]:
    return [ToolCall(f"call_{index}", name, {}) for index, name in enumerate(names)]


def stop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock, so that only `pass_time` advances it."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    loop.time = lambda: now  # type: ignore[method-assign]
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: loop.time()))


class Tools:
    """Tools whose `call` answers with the tool's name, after waiting for `gates[name]` if the tool has a gate."""

    def __init__(self, *gated: str) -> None:
        self.gates = {name: asyncio.Event() for name in gated}
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self.given: list[float | None] = []

    async def call(self, call: ToolCall, timeout_seconds: float | None) -> ToolResult:
        self.begun.append(call.name)
        self.given.append(timeout_seconds)
        try:
            if call.name in self.gates:
                await self.gates[call.name].wait()
        except asyncio.CancelledError:
            await settle()  # like a session that notifies its server
            self.cancelled.append(call.name)
            raise
        self.ended.append(call.name)
        return ToolResult(call.name)


async def test_calls_of_a_turn_run_side_by_side_and_answer_in_order() -> None:
    chain, tools = runner(seconds_per_call={"b": 7}), Tools("a", "b", "c")
    running = asyncio.create_task(chain.run(calls("a", "b", "c"), tools.call))
    await settle()
    assert tools.begun == ["a", "b", "c"]
    assert tools.given == [None, 7, None]
    for name in ("c", "a", "b"):
        tools.gates[name].set()
        await settle()
    assert tools.ended == ["c", "a", "b"]
    assert [result.content for result in await running] == ["a", "b", "c"]
    assert await chain.run([], tools.call) == []


async def test_a_stop_refuses_what_has_not_begun_and_lets_finish_what_runs() -> None:
    chain = runner(calls_per_tool={"b": 1}, on_breach={"calls_per_tool": {"action": "stop"}})
    tools = Tools("a")
    running = asyncio.create_task(chain.run(calls("a", "b", "b", "c"), tools.call))
    await settle()
    assert tools.begun == ["a", "b"]
    tools.gates["a"].set()
    contents = [result.content for result in await running]
    assert contents == [
        "a",
        "b",
        "Not run: the limit of 1 call of b in this conversation is reached. The conversation ends here.",
        "Not run: the limit calls_per_tool ended the conversation.",
    ]
    assert chain.stopped is Limit.CALLS_PER_TOOL
    assert breached(chain) == {"limits/calls_per_tool": 1}


async def test_time_over_cuts_the_calls_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_clock(monkeypatch)
    chain, tools = runner(tool_seconds=0.05), Tools("slow", "slower")
    running = asyncio.create_task(chain.run(calls("slow", "slower", "quick"), tools.call))
    await settle()
    pass_time(0.05)
    first, second, third = await running
    assert (first.error, second.error, third.content) == (CallError.LIMIT, CallError.LIMIT, "quick")
    assert str(first.content).startswith("Stopped: the limit of 0.05 s for all calls")
    assert first.seconds == pytest.approx(0.05)
    assert sorted(tools.cancelled) == ["slow", "slower"]
    assert breached(chain) == {"limits/tool_seconds": 2}
    [result] = await chain.run(calls("quick"), tools.call)
    assert str(result.content).startswith("Not run: the limit of 0.05 s")
    assert tools.begun == ["slow", "slower", "quick"]


async def test_cancelling_ends_all_calls() -> None:
    chain, tools = runner(), Tools("a", "b")
    running = asyncio.create_task(chain.run(calls("a", "b"), tools.call))
    await settle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(tools.cancelled) == ["a", "b"]
    assert [r.content for r in await chain.run(calls("d", "e"), tools.call)] == ["d", "e"]


# ---- errors in a recipe


@pytest.mark.parametrize("field", ["calls_per_tool", "cost_per_call", "calls_per_second", "seconds_per_call"])
def test_a_limit_of_an_unknown_tool_is_an_error(field: str) -> None:
    config = LimitsConfig.model_validate({field: {"serach": 1}})
    fix = f"limits.{field}.serach: there is no tool 'serach'; fix: did you mean search\\?"
    with pytest.raises(ValueError, match=fix):
        check_limits(config, ["search", "fetch"])
    with pytest.raises(ValueError, match="the tools are add, wait"):
        check_limits(config, ["add", "wait"])
    check_limits(config, ["serach"])


def test_limits_that_nothing_can_reach_are_refused() -> None:
    for limit in set(Limit) - {Limit.RESULT_BYTES}:  # which is always set
        with pytest.raises(ValidationError, match=f"on_breach.{limit}: .* set limits.{limit}"):
            LimitsConfig.model_validate({"on_breach": {limit: {}}})
        LimitsConfig.model_validate({**BREACHES[limit], "on_breach": {limit: {}}})
    with pytest.raises(ValidationError, match=r"no call costs anything; fix: set limits\.cost_per_call"):
        LimitsConfig(cost=1)

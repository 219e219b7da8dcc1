"""Every limit of a chain: the message to the model, the chain's ending, the metric, and the penalty."""

import re
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.config import Limit
from agentfactory.base.messages import CallError, text_of
from agentfactory.rollout.trajectory import Outcome, StopReason, Trajectory
from tests.chat_tokenizers import make_tokenizer, trl_template
from tests.scripted_chains import Scripted, call, scripted_chains

TOOLS = '''
import asyncio
from PIL import Image
from agentfactory import reward, tool

running = most = 0


@tool
async def search(query: str) -> str:
    """Search."""
    return f"found {query}"


@tool
async def rest(seconds: float) -> str:
    """Rest."""
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(seconds)
    running -= 1
    return f"rested, {most} at a time"


@tool
async def recite(words: int) -> str:
    """Recite."""
    return " ".join(f"word{n}" for n in range(words))


@tool
async def look() -> Image.Image:
    """Look."""
    return Image.new("RGB", (8, 8))


@reward
def one() -> float:
    return 1.0
'''


@dataclass
class Played:
    """A chain, and the text of its last prompt."""

    trajectory: Trajectory
    read: str

    @property
    def answers(self) -> list[str]:
        """The tools' results."""
        return [text_of(m["content"]) for m in self.trajectory.messages if m["role"] == "tool"]

    def moved(self, kind: str) -> dict[str, float]:
        """The metrics of `kind` that are not 0."""
        metrics = self.trajectory.metrics
        return {name: value for name, value in metrics.items() if name.startswith(kind) and value}


def open_chains(folder: Path, turns: Any, **fields: Any) -> AbstractAsyncContextManager[Scripted]:
    """A runner against a model that says `turns`; `fields` are recipe sections."""
    tools = [f"notes.py:{name}" for name in ("search", "rest", "recite", "look")]
    return scripted_chains(folder, turns, source=TOOLS, **{"tools": tools, "rewards": ["notes.py:one"], **fields})


async def play(turns: list[str], folder: Path, **fields: Any) -> Played:
    """Run one chain with `turns` as completions."""
    async with open_chains(folder, turns, **fields) as chains:
        return Played(await chains.run(), chains.sent()[-1] if turns else "")


@dataclass
class Case:
    """A recipe's `limits`, turns that reach the limit once, and the text of the last tool result."""

    limits: dict[str, Any]
    turns: list[str]
    said: str
    advice: str
    error: CallError | None = CallError.LIMIT
    before: list[str] = field(default_factory=lambda: ["found a"])


SEARCH, REST = call("search", query="a"), call("rest", seconds=60)
CASES = {
    Limit.CALLS_PER_TURN: Case(
        {"calls_per_turn": 1},
        [SEARCH + "\n" + SEARCH],
        "Not run: the limit of 1 call in one turn is reached.",
        "The call can be made in your next turn.",
    ),
    Limit.CALLS: Case(
        {"calls": 1},
        [SEARCH, SEARCH],
        "Not run: the limit of 1 call in this conversation is reached.",
        "Answer with what you have.",
    ),
    Limit.CALLS_PER_TOOL: Case(
        {"calls_per_tool": {"search": 1}},
        [SEARCH, SEARCH],
        "Not run: the limit of 1 call of search in this conversation is reached.",
        "Go on without search.",
    ),
    Limit.COST: Case(
        {"cost": 1, "cost_per_call": {"search": 0.75}},
        [SEARCH, SEARCH],
        "Not run: search costs 0.75, and of the limit of 1 only 0.25 is left.",
        "Go on without search.",
    ),
    Limit.TOOL_SECONDS: Case(
        {"tool_seconds": 1},
        [SEARCH, REST],
        "Stopped: the limit of 1 s for all calls of this conversation is reached.",
        "Answer with what you have.",
    ),
    Limit.CALLS_PER_SECOND: Case(
        {"calls_per_second": {"search": 0.001}},
        [SEARCH, SEARCH],
        "Not run: the limit of 0.001 calls of search per second is reached.",
        "The call can be made in your next turn.",
    ),
    Limit.SECONDS_PER_CALL: Case(
        {"seconds_per_call": {"rest": 0.3}},
        [SEARCH, REST],
        "Stopped: the limit of 0.3 s for one call of rest is reached.",
        "Try one that takes less time.",
        CallError.TIMEOUT,
    ),
    Limit.RESULT_BYTES: Case({"result_bytes": 1000}, [SEARCH, call("recite", words=400)], "", "", None),
    Limit.RESULT_TOKENS: Case({"result_tokens": 120}, [SEARCH, call("recite", words=400)], "", "", None),
    Limit.IMAGES: Case(
        {"images": 1},
        [call("look"), call("look")],
        "Image not shown: the limit of 1 image in this conversation is reached.",
        "Go on without it.",
        None,
        ["[image/png image]"],
    ),
}


def check_answer(case: Case, answers: list[str], then: str) -> None:
    assert answers[:-1] == case.before
    if not case.said:
        unit = "bytes" if "result_bytes" in case.limits else "tokens"
        shape = rf"word0 word1 .*\n\[\.\.\. \d+ of \d+ {unit} left out \.\.\.\]\n.* word398 word399"
        assert re.fullmatch(shape, answers[-1])
        if unit == "bytes":
            assert len(answers[-1]) == 1000 + len("\n[... 2190 of 3190 bytes left out ...]\n")
            return
        tokenizer = make_tokenizer(trl_template("qwen2_5"))
        assert len(tokenizer.encode(answers[-1], add_special_tokens=False)) <= 120
    else:
        assert answers[-1] == f"{case.said} {then}"


@pytest.mark.slow
@pytest.mark.parametrize("limit", Limit)
async def test_a_breach_is_told_and_the_chain_goes_on(limit: Limit, tmp_path: Path) -> None:
    case = CASES[limit]
    limits = {**case.limits, "on_breach": {limit: {"penalty": 0.25}}}
    played = await play([*case.turns, "done"], tmp_path, limits=limits)
    trajectory = played.trajectory
    check_answer(case, played.answers, case.advice)
    assert played.answers[-1] in played.read, "the model reads it"
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.COMPLETED, StopReason.ANSWER)
    assert played.moved("limits/") == {f"limits/{limit}": 1}
    assert played.moved("stop/") == {"stop/answer": 1}
    assert played.moved("tool_errors/") == ({f"tool_errors/{case.error}": 1} if case.error else {})
    assert (trajectory.metrics["penalty"], trajectory.reward) == (0.25, 0.75)


@pytest.mark.slow
@pytest.mark.parametrize("limit", Limit)
async def test_a_breach_ends_the_chain(limit: Limit, tmp_path: Path) -> None:
    case = CASES[limit]
    limits = {**case.limits, "on_breach": {limit: {"action": "stop", "penalty": 0.25}}}
    rollout = {"outcome_penalty": {"tool_limit": 0.125, "completed": 7}}
    played = await play(case.turns, tmp_path, limits=limits, rollout=rollout)
    trajectory = played.trajectory
    check_answer(case, played.answers, "The conversation ends here.")
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.TOOL_LIMIT, limit)
    assert trajectory.turns == len(case.turns)
    assert played.moved("limits/") == {f"limits/{limit}": 1}
    assert played.moved("stop/") == {f"stop/{limit}": 1}
    assert (trajectory.metrics["penalty"], trajectory.reward) == (0.375, 0.625)


async def test_without_a_breach_nothing_moves(tmp_path: Path) -> None:
    limits = {name: value for case in CASES.values() for name, value in case.limits.items()}
    played = await play([SEARCH, "done"], tmp_path, limits=limits)
    assert (played.answers, played.trajectory.reward) == (["found a"], 1.0)
    assert played.moved("limits/") == {}
    assert {f"limits/{limit}" for limit in Limit} < played.trajectory.metrics.keys(), "zeros too, for the means"
    assert {f"stop/{reason}" for reason in StopReason} < played.trajectory.metrics.keys()
    assert played.trajectory.metrics["tool_cost"] == 0.75
    assert 0 < played.trajectory.metrics["tool_seconds"] < 1


async def test_each_breach_has_its_penalty(tmp_path: Path) -> None:
    limits = {"calls": 1, "on_breach": {"calls": {"penalty": 0.25}}}
    played = await play([SEARCH, SEARCH, SEARCH, "done"], tmp_path, limits=limits)
    assert played.moved("limits/") == {"limits/calls": 2}
    assert played.trajectory.reward == 0.5


async def test_max_turns(tmp_path: Path) -> None:
    rollout = {"max_turns": 2, "outcome_penalty": {"max_turns": 0.5}}
    played = await play([SEARCH] * 9, tmp_path, rollout=rollout)
    trajectory = played.trajectory
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.MAX_TURNS, StopReason.MAX_TURNS)
    assert (trajectory.turns, played.answers) == (2, ["found a", "found a"])
    assert played.moved("stop/") == {"stop/max_turns": 1}
    assert (trajectory.metrics["penalty"], trajectory.reward) == (0.5, 0.5)


async def test_max_tokens(tmp_path: Path) -> None:
    rollout = {"max_tokens": 40, "outcome_penalty": {"max_tokens": 0.5}}
    cut_call = call("search", query="very " * 40)
    played = await play([cut_call, "and so on " * 40], tmp_path, rollout=rollout)
    trajectory = played.trajectory
    assert "The message was cut at 40 tokens: write a shorter one." in played.read, "a call that was cut is told"
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.MAX_TOKENS, StopReason.MAX_TOKENS)
    assert (trajectory.metrics["truncated_turns"], trajectory.reward) == (2, 0.5)
    assert played.moved("stop/") == {"stop/max_tokens": 1}


async def test_max_total_tokens(tmp_path: Path) -> None:
    rollout = {"max_total_tokens": 1000, "outcome_penalty": {"context_overflow": 0.5}}
    played = await play([call("recite", words=400), "done"], tmp_path, rollout=rollout)
    trajectory = played.trajectory
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.CONTEXT_OVERFLOW, StopReason.CONTEXT_OVERFLOW)
    assert trajectory.turns == 1, "no token is left for another"
    assert played.moved("stop/") == {"stop/context_overflow": 1}
    assert trajectory.reward == 0.5


@pytest.mark.slow
async def test_timeout_seconds(tmp_path: Path) -> None:
    rollout = {"timeout_seconds": 3, "on_outcome": {"timeout": "keep"}, "outcome_penalty": {"timeout": 0.5}}
    played = await play([SEARCH, REST], tmp_path, rollout=rollout)
    trajectory = played.trajectory
    assert (trajectory.outcome, trajectory.stop_reason, trajectory.reward) == (Outcome.TIMEOUT, None, 0.5)
    said = "the chain took longer than rollout.timeout_seconds=3; a call of rest had run for "
    assert str(trajectory.error).startswith(said)
    assert len(trajectory.turn_spans()) == 2
    assert played.moved("stop/") == {}, "it broke; outcome/timeout is the rate"
    assert played.trajectory.metrics["tool_seconds"] > 0.1, "the seconds of a call that was cut off count"


async def test_a_tool_that_finishes_comes_before_the_limit_that_stops(tmp_path: Path) -> None:
    """The chain has reached its goal, and a limit in the same turn does not undo that."""
    (tmp_path / "last.py").write_text(
        "from agentfactory import finish, tool\n\n\n"
        '@tool\nasync def submit(text: str) -> str:\n    """Submit."""\n    return finish(f"got {text}")\n'
    )
    limits = {"calls_per_turn": 1, "on_breach": {"calls_per_turn": {"action": "stop"}}}
    turn = call("submit", text="it") + "\n" + call("submit", text="more")
    played = await play([turn], tmp_path, tools=["last.py:submit"], limits=limits)
    assert (played.trajectory.outcome, played.trajectory.stop_reason) == (Outcome.COMPLETED, StopReason.FINISH)
    assert played.answers[0] == "got it"
    assert played.moved("limits/") == {"limits/calls_per_turn": 1}


@pytest.mark.slow
async def test_all_chains_share_a_rate_and_wait_for_their_time(tmp_path: Path) -> None:
    def turns(prompt: str) -> str:
        return "done" if "found a" in prompt else SEARCH

    async with open_chains(tmp_path, turns, limits={"calls_per_second": {"search": 4}}) as chains:
        started = time.monotonic()
        played = [Played(trajectory, "") for trajectory in await chains.run_all([{"question": "go"}] * 7)]
    assert [one.answers for one in played] == [["found a"]] * 7
    assert all(one.moved("limits/") == {} for one in played)
    assert time.monotonic() - started >= 0.75, "four at once, and three a quarter of a second apart"
    waits = [one.trajectory.metrics["tool_wait_seconds"] for one in played]
    assert 0 == min(waits) < max(waits) <= 1
    assert max(one.trajectory.metrics["tool_seconds"] for one in played) < 0.5, "to wait is not to run"


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_parallel_calls(most: int, tmp_path: Path) -> None:
    turn = "\n".join([call("rest", seconds=0.03)] * 3)
    played = await play([turn, "done"], tmp_path, limits={"parallel_calls": most})
    assert played.answers[-1] == f"rested, {most} at a time"
    assert played.moved("limits/") == {}


async def test_limits_of_tools_that_are_not_there_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"limits\.calls_per_tool\.serach: .* did you mean search\?"):
        await play(["done"], tmp_path, limits={"calls_per_tool": {"serach": 1}})

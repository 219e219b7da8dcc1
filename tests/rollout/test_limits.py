"""Limits in whole chains: the message to the model, the chain's ending, the metric, and the penalty.

Each limit of a call: tests/tools/test_limits.py."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.config import Limit
from agentfactory.base.messages import text_of
from agentfactory.rollout.trajectory import Outcome, StopReason, Trajectory
from tests.chat_tokenizers import make_tokenizer, trl_template
from tests.scripted_chains import call, scripted_chains

TOOLS = '''
import asyncio
from PIL import Image
from agentfactory import finish, reward, tool


@tool
async def search(query: str) -> str:
    """Search."""
    return f"found {query}"


@tool
async def rest(seconds: float) -> str:
    """Rest."""
    await asyncio.sleep(seconds)


@tool
async def recite(words: int) -> str:
    """Recite."""
    return " ".join(f"word{n}" for n in range(words))


@tool
async def look() -> Image.Image:
    """Look."""
    return Image.new("RGB", (8, 8))


@tool
async def submit(text: str) -> str:
    """Submit."""
    return finish(f"got {text}")


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
        return [text_of(m["content"]) for m in self.trajectory.messages if m["role"] == "tool"]

    def moved(self, kind: str) -> dict[str, float]:
        """The metrics of `kind` that are not 0."""
        metrics = self.trajectory.metrics
        return {name: value for name, value in metrics.items() if name.startswith(kind) and value}


async def play(turns: list[str], folder: Path, **fields: Any) -> Played:
    tools = [f"notes.py:{name}" for name in ("search", "rest", "recite", "look", "submit")]
    async with scripted_chains(folder, turns, source=TOOLS, tools=tools, rewards=["notes.py:one"], **fields) as chains:
        return Played(await chains.run(), chains.sent()[-1])


SEARCH, REST, LOOK, TALK = call("search", query="a"), call("rest", seconds=60), call("look"), call("recite", words=400)
COST = {"cost": 1, "cost_per_call": {"search": 0.75}}


@pytest.mark.parametrize("action", ["tell", "stop"])
@pytest.mark.parametrize(
    ("limit", "limits", "turns", "said", "error"),
    [
        (Limit.COST, COST, [SEARCH] * 3, "Not run: search costs 0.75, and of the limit of 1 only", "tool_limit"),
        (Limit.SECONDS_PER_CALL, {"seconds_per_call": {"rest": 0.1}}, [SEARCH, REST], "Stopped: the ", "tool_timeout"),
        (Limit.RESULT_TOKENS, {"result_tokens": 120}, [SEARCH, TALK], "word0 word1", None),
        (Limit.IMAGES, {"images": 1}, [LOOK, LOOK], "Image not shown: the limit of 1 image", None),
    ],
)
async def test_a_breach(
    limit: Limit, limits: dict[str, Any], turns: list[str], said: str, error: str | None, action: str, tmp_path: Path
) -> None:
    stops, turns = action == "stop", turns[:2]
    rollout = {"outcome_penalty": {"tool_limit": 0.125}}
    given = {**limits, "on_breach": {limit: {"action": action}}}
    played = await play([*turns, "done"], tmp_path, limits=given, rollout=rollout)
    trajectory = played.trajectory
    assert played.answers[-1].startswith(said)
    assert (played.answers[-1] in played.read) == (not stops), "the model reads it"
    if limit is Limit.RESULT_TOKENS:
        assert re.search(r"\n\[\.\.\. \d+ of \d+ tokens left out \.\.\.\]\n.* word399$", played.answers[-1])
        tokenizer = make_tokenizer(trl_template("qwen2_5"))
        assert len(tokenizer.encode(played.answers[-1], add_special_tokens=False)) <= 120
    else:
        assert played.answers[-1].endswith("The conversation ends here.") == stops
    ending = (Outcome.TOOL_LIMIT, limit) if stops else (Outcome.COMPLETED, StopReason.ANSWER)
    assert (trajectory.outcome, trajectory.stop_reason) == ending
    assert trajectory.turns == 2 + (not stops)
    assert played.moved("limits/") == {f"limits/{limit}": 1}
    assert played.moved("stop/") == {f"stop/{ending[1]}": 1}
    assert played.moved("tool_errors/") == ({f"tool_errors/{error}": 1} if error else {})
    penalty = 0.125 if stops else 0.0
    assert (trajectory.metrics["penalty"], trajectory.reward) == (penalty, 1 - penalty)


async def test_without_a_breach_nothing_moves(tmp_path: Path) -> None:
    limits = {**COST, "calls": 1, "tool_seconds": 1, "calls_per_second": {"search": 1}, "images": 1, "result_tokens": 9}
    played = await play([SEARCH, "done"], tmp_path, limits=limits)
    assert (played.answers, played.trajectory.reward) == (["found a"], 1.0)
    assert played.moved("limits/") == {}
    assert {f"limits/{limit}" for limit in Limit} < played.trajectory.metrics.keys(), "zeros too, for the means"
    assert {f"stop/{reason}" for reason in StopReason} < played.trajectory.metrics.keys()
    assert set(Limit) < set(StopReason)
    assert played.trajectory.metrics["tool_cost"] == 0.75
    assert 0 < played.trajectory.metrics["tool_seconds"] < 1


@pytest.mark.parametrize(
    ("outcome", "settings", "texts", "turns", "read"),
    [
        ("max_turns", {"max_turns": 2}, [SEARCH] * 9, 2, "found a"),
        (
            "max_tokens",
            {"max_tokens": 40},
            [call("search", query="very " * 40), "and so on " * 40],
            2,
            "The message was cut at 40 tokens: write a shorter one.",
        ),
        # no token is left for another turn
        ("context_overflow", {"max_total_tokens": 1500}, [TALK, "done"], 1, "recite"),
    ],
)
async def test_limits_of_turns_and_tokens(
    outcome: str, settings: dict[str, int], texts: list[str], turns: int, read: str, tmp_path: Path
) -> None:
    played = await play(texts, tmp_path, rollout={**settings, "outcome_penalty": {outcome: 0.5}})
    trajectory = played.trajectory
    assert (trajectory.outcome, trajectory.stop_reason) == (outcome, outcome)
    assert (trajectory.turns, trajectory.metrics["penalty"], trajectory.reward) == (turns, 0.5, 0.5)
    assert len([m for m in trajectory.messages if m["role"] == "tool"]) == {"max_tokens": 1}.get(outcome, turns)
    assert trajectory.metrics["truncated_turns"] == (2 if outcome == "max_tokens" else 0)
    assert played.moved("stop/") == {f"stop/{outcome}": 1}
    assert read in played.read


async def test_a_tool_that_finishes_comes_before_the_limit_that_stops(tmp_path: Path) -> None:
    limits = {"calls_per_turn": 1, "on_breach": {"calls_per_turn": {"action": "stop"}}}
    played = await play([call("submit", text="it") + "\n" + call("submit", text="more")], tmp_path, limits=limits)
    assert (played.trajectory.outcome, played.trajectory.stop_reason) == (Outcome.COMPLETED, StopReason.FINISH)
    assert played.answers[0] == "got it"
    assert played.moved("limits/") == {"limits/calls_per_turn": 1}

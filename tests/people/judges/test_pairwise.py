"""The group reward `pairwise`: both orders, ties, tournaments, and the bias by position."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from agentfactory.rollout.trajectory import Outcome, Trajectory
from tests.people.judges.conftest import JudgeServer, verdict_of
from tests.rollout.test_reward_library import load, said


async def compare(texts: str, **options: Any) -> list[Trajectory]:
    chains = [said(text, reward=0.0) for text in texts]
    async with load("pairwise", model="m", **options) as rewards:
        await rewards.score_group(chains, {"question": "q"})
    return chains


def prefers(better: Callable[[str, str], str]) -> Callable[[str], str]:
    """A judge that answers by the two last answers that it sees."""

    def answer(prompt: str) -> str:
        shown = (re.findall(rf"<<< {name}, turn 1 .*\n. assistant: (.*)", prompt)[-1] for name in ("first", "second"))
        return verdict_of(prompt, better(*shown))

    return answer


def later(first: str, second: str) -> str:
    """The letter that comes later in the alphabet is better."""
    return "first" if first > second else "second"


@pytest.mark.parametrize(("tournament", "rewards", "calls"), [("all", [0, 1, 0.5], 6), ("knockout", [0, 1, 0.5], 4)])
async def test_each_pair_is_asked_in_both_orders(
    judge: JudgeServer, tournament: str, rewards: list[float], calls: int
) -> None:
    judge.answer = prefers(later)
    chains = await compare("acb", url=judge.url, tournament=tournament)
    assert [chain.reward for chain in chains] == rewards
    assert chains[0].metrics == {f"pairwise/{name}": 0.0 for name in ("position_bias", "disagreement", "cached")}
    assert len(judge.requests) == calls


@pytest.mark.parametrize(("word", "bias"), [("first", 1.0), ("second", -1.0), ("**Tie**", 0.0)])
async def test_a_judge_of_positions_gives_ties(judge: JudgeServer, word: str, bias: float) -> None:
    judge.answer = prefers(lambda first, second: word)
    chains = await compare("aab", url=judge.url)
    assert [chain.reward for chain in chains] == [0.5] * 3
    assert {chain.metrics["pairwise/position_bias"] for chain in chains} == {bias}
    assert {chain.metrics["pairwise/disagreement"] for chain in chains} == {abs(bias)}
    assert len(judge.requests) == 4, "equal chains are not compared"


async def test_a_judge_that_fails_costs_the_group_its_outcome(judge: JudgeServer) -> None:
    judge.answer = prefers(lambda first, second: "both")
    for chain in await compare("ab", url=judge.url):
        assert (chain.outcome, chain.reward) == (Outcome.REWARD_ERROR, None)
        assert "neither first, second nor tie" in str(chain.error)

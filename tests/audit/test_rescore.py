"""`agentfactory rescore`: a reward that is wrong on purpose is found."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agentfactory.audit.laboratory.rescore import disagree, rescore
from agentfactory.audit.laboratory.rescore_command import _lines, _rewards
from agentfactory.audit.record import Record, Seen
from agentfactory.base.errors import SettingError
from agentfactory.rollout.rewards import RewardError, Rewards, reward
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory

TEXTS = ["4", "4, I am very sure of it", "5", "5, and no doubt about it"]


def record(tmp_path: Path, rewards: Sequence[float | None], groups: int = 20) -> Record:
    """A run whose chains say TEXTS, with these saved rewards."""

    def seen() -> Iterator[Seen]:
        for number in range(groups):
            chains = []
            for index, (text, saved) in enumerate(zip(TEXTS, rewards, strict=True)):
                messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}]
                chains.append(Trajectory(f"g{number}.{index}", messages, [], Outcome.COMPLETED, saved, turns=1))
            yield Seen(Group(f"g{number}", {"question": "2 + 2?", "answer": "4"}, chains), "train.jsonl")

    return Record("mine", "agentfactory", tmp_path, seen, groups)


@reward
def begins_right(prediction: str, answer: str) -> float:
    if prediction == "5":
        raise RewardError("not today")
    return float(prediction.startswith(answer))


async def test_a_reward_that_is_wrong_on_purpose_is_found(tmp_path: Path) -> None:
    async with Rewards([begins_right]) as rewards:
        # paid for length, and with the sign turned
        for wrong in ([0.1, 0.9, 0.1, 1.0], [0.0, 0.1, 1.0, 1.0]):
            found = (await rescore(record(tmp_path, wrong), rewards, 1000)).to_json()
            assert disagree(found)
            assert (found["chains"], found["failed"], found["groups"], found["flipped"]) == (60, 20, 20, 20)
            assert found["within_groups"] < 0
            assert {one["chain"].split(".")[1] for one in found["differ_most"]} <= {"0", "1", "3"}
        right = (await rescore(record(tmp_path, [1.0, 0.9, 0.0, 0.0]), rewards, 30)).to_json()
        assert not disagree(right)
        assert (right["chains"], right["flipped"], right["within_groups"]) == (21, 0, pytest.approx(0.87, abs=0.01))
        told = "\n".join(_lines({"run": "mine", **right}, tmp_path, 0))
        assert "mine: the rewards agree: 21 chains scored, 7 failed" in told
        assert f"(open them: agentfactory view {tmp_path})" in told
        assert "failed: chain g2.2: begins_right: not today" in told


async def test_a_reward_that_needs_what_is_gone_is_refused(tmp_path: Path) -> None:
    for given, message in (
        ([], "an environment gave"),
        ([reward(lambda environment: 0.0)], "takes the chain's environment"),
        ([reward(lambda model_view: 0.0)], "takes the chain's model_view"),
        ([reward(lambda gold: 0.0)], "needs 'gold'"),
    ):
        with pytest.raises(SettingError, match=message):
            async with Rewards(given) as rewards:
                await rescore(record(tmp_path, [1.0] * 4), rewards, 10)
    assert _rewards("{reward: length, weight: 2, options: {longest: 9}}")[0].weight == 2
    with pytest.raises(SettingError, match="is no reward"):
        _rewards("{prize: 1}")


async def test_chains_without_tokens_or_rewards_get_no_other_reward(tmp_path: Path) -> None:
    async with Rewards(_rewards("{reward: length, options: {longest: 9}}")) as rewards:
        for saved, failed, told in (([1.0] * 4, 80, "length: the chain has no tokens"), ([None] * 4, 0, "no saved")):
            found = (await rescore(record(tmp_path, saved), rewards, 1000)).to_json()
            assert (found["chains"], found["failed"], told in found["errors"][0]) == (0, failed, True)

"""`agentfactory judge check`: kappa against values of scikit-learn's definition, and biases."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentfactory.audit.laboratory.agreement import agreement, kappa, lines, read_labels
from agentfactory.base.errors import SettingError
from agentfactory.commands.main import main
from agentfactory.rollout.config import RewardConfig
from agentfactory.rollout.rewards.reward_spec import load_reward
from tests.people.judges.conftest import JudgeServer, verdict_of


def test_kappa_as_computed_by_hand() -> None:
    # observed 3/5, by chance 13/25
    assert kappa([1, 1, 0, 0, 1], [1, 0, 0, 1, 1], weighted=False) == pytest.approx((3 / 5 - 13 / 25) / (1 - 13 / 25))
    # squares: 5 seen in 4 pairs, and 88 in all 16 pairs of the margins
    assert kappa([1, 2, 3, 5], [1, 3, 5, 5], weighted=True) == pytest.approx(1 - 5 * 4 / 88)
    assert kappa([1, 2, 3], [1, 2, 3], weighted=True) == 1.0
    assert kappa([1, 0], [0, 1], weighted=False) == -1.0
    assert kappa([1, 1], [1, 1], weighted=False) is None


async def check(tmp_path: Path, reward: str, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = load_reward(RewardConfig(reward=reward, options={"model": "m", **options}), "rewards.0", tmp_path)
    return await agreement(spec, read_labels(tmp_path / "labels.jsonl"))


async def test_a_judge_of_length_is_told(judge: JudgeServer, tmp_path: Path) -> None:
    def by_length(prompt: str) -> str:
        return verdict_of(prompt, min(5, 1 + prompt.count("word") // 2))

    judge.answer = by_length
    criteria = [{"text": "How good is it?", "scale": [1, 5]}]
    rows: list[dict[str, Any]] = [{"question": "q", "prediction": "word " * n, "label": 3} for n in range(10)]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    said = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "word word"}]
    rows.append({"messages": [*said, {"role": "assistant", "content": ""}], "label": 2})
    found = await check(tmp_path, "rubric", rows, url=judge.url, criteria=criteria)
    assert (found["texts"], found["failed"], found["agreement"]) == (11, 0, pytest.approx(3 / 11))
    assert found["length_bias"] > 0.9
    assert abs(found["kappa"]) < 0.3
    assert "rank correlation of score minus label with length: 0.9" in "\n".join(lines(found))
    judge.answer = lambda prompt: verdict_of(prompt, 3) if prompt.count("word") % 2 else "no verdict"
    found = await check(tmp_path, "rubric", rows, url=judge.url, criteria=criteria)
    assert (found["failed"], found["kappa"]) == (6, None)
    assert "labels.jsonl:1: rubric: no verdict in the form" in found["errors"][0]


async def test_a_judge_of_positions_is_told(judge: JudgeServer, tmp_path: Path) -> None:
    judge.answer = lambda prompt: verdict_of(prompt, "first")
    rows = [{"predictions": [f"a{n}", f"b{n}"], "label": label} for n, label in enumerate(["first", 1, "tie", "tie"])]
    found = await check(tmp_path, "pairwise", rows, url=judge.url)
    assert (found["position_bias"], found["disagreement"], found["agreement"], found["kappa"]) == (1.0, 1.0, 0.5, 0.0)
    assert "bias to the first place 1.00" in "\n".join(lines(found))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prediction": "a"}, "labels.jsonl:1 has no label"),
        ({"label": 1}, "has no text to judge"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}], "label": 1}, r"1: messages.0.tool_calls: got 5"),
        ({"prediction": "a", "label": "good"}, "has the label 'good'; fix: write a number, yes or no"),
        ({"predictions": ["a", "b"], "label": "c"}, "fix: write first, second or tie"),
        ({"prediction": "a", "label": 4}, "has the label 4, and .* goes from 0 to 1; fix: give the labels"),
    ],
)
async def test_labels_that_cannot_be_used(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        await check(tmp_path, "rubric", [row], url="http://127.0.0.1:9", criteria=["Is it right?"])


def test_a_recipe_of_rewards_alone_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = f"{tmp_path}/no/judges.sqlite"
    options = {"url": "http://127.0.0.1:9", "model": "m", "criteria": ["a"], "retries": 0, "cache": cache}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"rewards": [{"reward": "rubric", "options": options}]}))
    for row, status, told in (
        ({"predictions": ["a", "b"], "label": "tie"}, 2, "labels.jsonl has no text for the judges of"),
        ({"prediction": "a", "label": 1}, 1, "judges.sqlite does not exist: no answers are kept"),
        ({"prediction": "a", "label": 1, "self": 2}, 1, "labels.jsonl:1: rubric raised TypeError"),
    ):
        (tmp_path / "labels.jsonl").write_text(json.dumps(row))
        assert main(["judge", "check", str(tmp_path / "recipe.yaml"), str(tmp_path / "labels.jsonl")]) == status
        assert told in "".join(capsys.readouterr())

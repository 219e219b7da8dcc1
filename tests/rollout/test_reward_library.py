"""The prebuilt rewards, each against an independent reference."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward

from agentfactory.audit.checks.rewards import MODELS
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import EnvironmentReward
from agentfactory.base.user_code.loading import load_object
from agentfactory.rollout.config import RewardConfig, RolloutRecipe
from agentfactory.rollout.rewards import PREBUILT, RewardError, Rewards
from agentfactory.rollout.rewards.answers import F1, ExactMatch, normalize, token_f1
from agentfactory.rollout.rewards.form_and_length import Format, Length
from agentfactory.rollout.rewards.math_equal import MathEqual
from agentfactory.rollout.rewards.text import last_match
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Outcome, Trajectory
from tests.conftest import REPOSITORY


def said(*texts: str, tokens: int = 0, **fields: Any) -> Trajectory:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for text in texts:
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": "42"}]
    row = Row(token_ids=[0] * (tokens + 3), mask=[0] * 3 + [1] * tokens)
    return Trajectory("c", messages, [row], Outcome.COMPLETED, turns=len(texts), **fields)


def load(name: str, **options: Any) -> Rewards:
    return Rewards([RewardConfig(reward=name, options=options)])


async def score(name: str, prediction: str, row: dict[str, Any], **options: Any) -> EnvironmentReward:
    async with load(name, **options) as rewards:
        rewards.check(row)
        return await rewards.score(said(prediction), row, None)


# computed manually as SQuAD 2.0's official evaluation script does: prediction, answer, exact match, F1
SQUAD = [
    ("The Cat!", "cat", 1, 1.0),
    ("a  cat, an the", "cat", 1, 1.0),
    ("theatre", "atre", 0, 0.0),
    ("Denver Broncos", "the Denver Broncos", 1, 1.0),
    ("Broncos of Denver", "Denver Broncos", 0, 2 * (2 / 3) * 1 / (2 / 3 + 1)),
    ("red red blue", "red green", 0, 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
    ("U.S.A.", "usa", 1, 1.0),
    ("10-12", "1012", 1, 1.0),
    ("", "", 1, 1.0),
    ("the", "a", 1, 1.0),
    ("", "cat", 0, 0.0),
    ("“cat”", "cat", 0, 0.0),
]


def test_short_answers_as_squad_has_them() -> None:
    for prediction, answer, exact, f1 in SQUAD:
        assert ExactMatch()(prediction, answer=answer) == {"reward": exact, "success": exact}
        assert F1()(prediction, answer=answer) == pytest.approx(f1)
        assert token_f1(answer, prediction) == pytest.approx(f1)


def test_any_of_several_answers_is_right() -> None:
    row = {"golds": ["Denver Broncos", "Broncos", 7]}
    exact = ExactMatch(field="golds")
    assert [exact(said, **row)["reward"] for said in ("broncos", "7", "Denver")] == [1, 1, 0]
    assert F1(field="golds")("Denver", **row) == pytest.approx(2 / 3)
    assert normalize(" An  Apple,a Day ") == "applea day"


def test_what_counts_can_be_cut_out() -> None:
    exact = ExactMatch(extract="<answer>(.*?)</answer>", extract_answer="#### (.*)")
    row = {"answer": "First 3 + 4.\n#### 7"}
    assert exact("<answer>8</answer> no: <answer>\n7 </answer>", **row)["reward"] == 1
    assert exact("7", **row)["reward"] == 0
    with pytest.raises(ValueError, match=r"finds no match of '#### \(\.\*\)' in the field 'answer'"):
        exact.check({"answer": "7"})


@pytest.mark.parametrize("row", [{"question": "q"}, {"answer": []}, {"answer": None}, {"answer": {"text": "x"}}])
@pytest.mark.parametrize("name", ["exact_match", "f1", "math_equal"])
def test_a_row_without_an_answer_is_told_before_the_run(name: str, row: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=rf"rewards\.0: {name} needs .*'answer'"):
        load(name).check(row)


def test_a_pattern_that_backtracks_for_ever_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfactory.rollout.rewards.text.SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        last_match(r"(a|aa|a?a)+$(?<=b)", "a" * 5000 + "c")


# math-verify's README, its docstrings, and what its README promises by kind
MATH = [
    ("${1,2,3,4}$", "${1,3} \\cup {2,4}$", 1),
    ("The answer is $\\frac{1}{2}$", "1/2", 1),
    ("The answer is 1/2", "0.5", 1),
    ("So it is \\boxed{2\\sqrt{3}}.", "\\sqrt{12}", 1),
    ("$x + y$", "y+x", 1),
    ("$x + y$", "y-x", 0),
    ("it makes 1,234 in all", "1234", 1),
    ("about 50% of it", "0.5", 1),
    ("first 41, then 42", 42, 1),
    ("first 42, then 41", 42, 0),
    ("$x + 2$", "x + 1", 0),
    ("no idea", "42", 0),
    ("$(1,2)$", "$(1,2)$", 1),
    ("$0 < x < 1$", "$(0,1)$", 0),
]


@pytest.fixture(scope="module")
def math_equal() -> Iterator[Callable[..., MathEqual]]:
    """Makes rewards that share one process, which takes seconds to import sympy."""
    first = MathEqual(processes=1)

    def make(**options: Any) -> MathEqual:
        equal = MathEqual(processes=1, **options)
        equal._processes = first._processes
        return equal

    yield make
    first.close()


@pytest.mark.processes
def test_mathematics_as_math_verify_has_it(math_equal: Callable[..., MathEqual]) -> None:
    equal = math_equal()
    assert [(p, a, equal(p, answer=a)["success"]) for p, a, _ in MATH] == MATH


@pytest.mark.processes
def test_strict_mathematics_agrees_with_trl(math_equal: Callable[..., MathEqual]) -> None:
    texts = [
        *("My answer is \\boxed{\\frac{1}{3}}", "My answer is \\boxed{\\frac{1}{2}}", "\\frac{1}{3}", "It is 1/3"),
        *("The final answer is $\\frac{1}{3}$", "I found $\\frac{1}{3}$ somewhere"),
        "\\boxed{\\frac{1}{3}} or rather \\boxed{0.5}",
    ]
    gold = "\\frac{1}{3}"
    theirs = accuracy_reward([[{"role": "assistant", "content": text}] for text in texts], [gold] * len(texts))
    equal = math_equal(strict=True)
    ours = [equal(text, answer=gold)["reward"] for text in texts]
    assert ours == theirs
    assert set(ours) == {0.0, 1.0}


@pytest.mark.processes
def test_mathematics_of_gsm8k_and_of_tags(math_equal: Callable[..., MathEqual]) -> None:
    gsm8k, tagged = math_equal(extract_answer="#### (.*)"), math_equal(extract="<answer>(.*?)</answer>")
    for prediction, reward in (("So \\boxed{1018}", 1.0), ("She has 1018.", 1.0), ("She has 1000.", 0.0)):
        assert gsm8k(prediction, answer="She has 1,000 + 18.\n#### 1,018")["reward"] == reward
    assert tagged("1 <answer>x + 1</answer>", answer="1+x")["reward"] == 1.0
    assert tagged("<answer>x + 1</answer>", answer="1")["reward"] == 0.0


@pytest.mark.extended
@pytest.mark.processes
def test_a_prediction_on_which_sympy_hangs_is_wrong_and_the_next_is_judged() -> None:
    equal = MathEqual(processes=1, seconds=1.0)
    for bomb in ("$9^{9^{9^{9}}}$", "$" + "a b " * 100_000 + "$"):
        assert equal(bomb, answer="1") == {"reward": 0.0, "success": 0.0, "math_timeout": 1.0}
    assert equal("it is 42", answer="42") == {"reward": 1.0, "success": 1.0, "math_timeout": 0.0}
    others = len(children("agentfactory.rollout.rewards.math_comparison")) - 1
    equal.close()
    assert len(children("agentfactory.rollout.rewards.math_comparison")) == others


@pytest.mark.processes
def test_an_answer_that_cannot_be_read_is_an_error(math_equal: Callable[..., MathEqual]) -> None:
    equal = math_equal(seconds=1.0)
    with pytest.raises(RewardError, match="cannot parse any of the answers"):
        equal("it is 42", answer="")
    with pytest.raises(RewardError, match=r"took longer than 1 s to parse"):
        equal("it is 42", answer="a b " * 100_000)
    assert equal("it is 42", answer="42")["reward"] == 1.0, "by the next process"


def children(module: str) -> list[psutil.Process]:
    running = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in running if module in child.cmdline()]


THOUGHTS = [
    "<think>\nThis is my reasoning.\n</think>\nThis is my answer.",
    "<think>\nThis is my reasoning.\nThis is my answer.",
    "<think>a</think><think>b</think>c",
    "Well <think>a</think> b",
    "<think></think>",
]


def test_form_by_pattern_agrees_with_trl() -> None:
    theirs = think_format_reward([[{"content": text}] for text in THOUGHTS])
    form = Format(pattern=r"<think>(?!.*<think>)(.*?)</think>.*")
    assert [form(said(text)) for text in THOUGHTS] == theirs
    assert set(theirs) == {0.0, 1.0}


def test_form_by_tags() -> None:
    form = Format(tags=("think", "answer"))
    for text in ("<think>a</think><answer>b</answer>", "so: <think>a</think>\n<answer>b</answer> done"):
        assert form(said("no form", text)) == 1.0
    for text in (
        *("<answer>b</answer><think>a</think>", "<think>a<answer>b</answer></think>", "<think>a</think><answer>b", ""),
        "<think>a</think><answer>b</answer><answer>c</answer>",
    ):
        assert form(said("no form", text)) == 0.0


def test_form_of_every_turn_is_a_share() -> None:
    assert [Format(pattern="a+")(said(text)) for text in (" aa\n", "aab", "baa")] == [1.0, 0.0, 0.0]
    chain = said("<think>a</think>", "b", "<think>c</think>", "<think>d</think>")
    assert Format(pattern="<think>.*", every_turn=True)(chain) == 0.75
    assert Format(pattern="<think>.*", every_turn=True)(said()) == 0.0


@pytest.mark.parametrize("buffer", [0, 20, 100])
def test_length_agrees_with_trl(buffer: int) -> None:
    lengths = [0, 1, 79, 80, 81, 90, 99, 100, 101, 500]
    theirs = get_soft_overlong_punishment(100, buffer)(completion_ids=[[1] * length for length in lengths])
    ours = [Length(longest=100, buffer=buffer)(said("a", tokens=length)) for length in lengths]
    assert ours == pytest.approx(theirs)
    assert min(ours) == -1.0
    assert Length(longest=2, buffer=2, turns=True)(said("a", "b", "c")) == -1.0
    assert Length(longest=4, buffer=2, turns=True)(said("a", "b", "c")) == -0.5


PAGE = (REPOSITORY / "docs" / "rewards.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(python|yaml|json)\n(.*?)```", re.DOTALL)


def test_the_page_lists_every_reward_and_option() -> None:
    lines = PAGE.splitlines()
    for name in PREBUILT:
        [line] = [line for line in lines if line.startswith(f"| `{name}` |")]
        if name in MODELS:
            line = "".join(lines[lines.index("## A judge") :]) + (REPOSITORY / "docs" / "judges.md").read_text()
        options = load_object(name, Path(), PREBUILT).__dataclass_fields__
        assert [option for option in options if f"`{option}" not in line] == []


@pytest.mark.processes
async def test_what_the_page_shows_works(tmp_path: Path) -> None:
    blocks: dict[str, list[str]] = {"python": [], "yaml": [], "json": []}
    for language, text in BLOCK.findall(PAGE):
        blocks[language].append(text)
    for text in blocks["python"]:
        (tmp_path / text.split()[1]).write_text(text)
    [row] = map(json.loads, blocks["json"])
    scored = []
    for text in blocks["yaml"]:
        recipe = RolloutRecipe.model_validate({"model": {"path": "x"}, **yaml.safe_load(text)})
        async with Rewards(recipe.rewards, tmp_path) as rewards:
            rewards.check(row)
            if recipe.rewards[0].reward != "judge":
                chains = [replace(said(answer, tokens=2000), reward=0.0) for answer in ("4", "4", "five")]
                for chain in chains:
                    chain.reward = (await rewards.score(chain, row, None)).reward
                await rewards.score_group(chains, row)
                scored.append([chain.reward for chain in chains])
    right = [1.0, 1.0, 0.0]
    long = pytest.approx([reward - 0.5 * 464 / 512 for reward in right])
    assert scored == [right, right, long, [1.0, 1.0, 0.5], [0.0, 0.0, 0.0], right]

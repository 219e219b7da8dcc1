"""The world reasoning_gym: tasks from seeds, and scores by the library's verifiers."""

import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.processes.killable import KillableProcess
from agentfactory.worlds.reasoning_gym import gym_tasks
from agentfactory.worlds.reasoning_gym.gym_tasks import INSTRUCTION, ReasoningGymTasks
from agentfactory.worlds.reasoning_gym.reasoning_gym import ReasoningGym, VerifierError

pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.processes

REFUSED = {"composite", "game_of_life_halting"}
"""A mix of data sets, and one whose verifier accepts any answer."""
UNANSWERED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Data sets without stored answers."""


def data_set_names() -> set[str]:
    from reasoning_gym.factory import DATASETS

    return set(DATASETS)


@pytest.fixture(scope="module")
def world() -> Iterator[ReasoningGym]:
    world = ReasoningGym(seconds=5)
    yield world
    world.close()


@pytest.fixture(scope="module")
def process() -> Iterator[KillableProcess]:
    process = KillableProcess("-m", gym_tasks.PROCESS, variables=gym_tasks.VARIABLES)
    end = process.end
    process.end = lambda: None  # type: ignore[method-assign]
    yield process
    end()


@pytest.fixture
def one_process(process: KillableProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate all tasks in one process: a start takes a second."""
    monkeypatch.setattr(gym_tasks, "KillableProcess", lambda *arguments, **options: process)


def score(world: ReasoningGym, row: dict[str, Any], prediction: str) -> float:
    world.reset(row["question"], row["reasoning_gym"])
    verdict = world.reward(prediction)
    assert verdict["success"] == (verdict["reward"] == 1.0)
    return verdict["reward"]


def answer(text: Any) -> str:
    return f"Let me think: <answer>no</answer>. Better: <answer>\n{text} </answer>"


def test_tasks_are_verified(world: ReasoningGym, one_process: None, caplog: pytest.LogCaptureFixture) -> None:
    mixed = {"leg_counting": {"weight": 2}, "prime_factorization": {"level": 1}, "word_ladder": {}}
    rows = ReasoningGymTasks(datasets=mixed, size=8, seed=3).rows()
    assert Counter(row["source"] for row in rows) == {"leg_counting": 4, "prime_factorization": 2, "word_ladder": 2}
    assert {row["source"] for row in rows[:4]} == set(mixed)
    for row in rows:
        assert row["question"].endswith(f"\n\n{INSTRUCTION}")
        assert score(world, row, answer(row["answer"])) == 1.0
        assert score(world, row, "") == score(world, row, str(row["answer"])) == 0.0
        with caplog.at_level(logging.WARNING):
            assert score(world, row, answer("two")) < 1.0
    # the verifier of prime_factorization raises for an answer that is no number
    told = [record.notice for record in caplog.records if hasattr(record, "notice")]
    assert {notice.topic for notice in told} == {"verifier of prime_factorization"}
    assert "raised ValueError: invalid literal for int" in told[0].text
    assert "for an answer of the model, which scores 0; such an answer is 'two'" in told[0].text

    # rows of another version of the library
    changed = {**rows[0], "question": "How many legs?"}
    with pytest.raises(VerifierError, match="task 0 of leg_counting: the installed reasoning-gym generates another"):
        score(world, changed, answer(1))
    # other chains go on
    assert score(world, rows[0], answer(rows[0]["answer"])) == 1.0


@pytest.mark.extended
def test_a_verifier_that_hangs_is_ended(
    world: ReasoningGym, one_process: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "_seconds", 2.0)
    row, other = ReasoningGymTasks(datasets=["rubiks_cube", "gcd"], size=2).rows()
    with caplog.at_level(logging.WARNING):
        assert score(world, row, answer("R99999999")) == 0.0
    assert "the verifier of rubiks_cube took longer than 2 s" in caplog.text
    assert score(world, row, answer("1" * 200_000)) == 0.0
    assert score(world, other, answer(other["answer"])) == 1.0


def test_answers_that_no_task_has(world: ReasoningGym, one_process: None) -> None:
    rows = ReasoningGymTasks(datasets=["number_sorting", "complex_arithmetic", "coin_flip"], size=3).rows()
    count = rows[0]["answer"].count(",") + 1
    hostile = [str(["nan"] * count), f"[{', '.join(['NaN'] * count)}]", "nan", "nan+nanj", "inf", "1e9999999999"]
    for row in rows:
        assert max(score(world, row, answer(text)) for text in hostile) == 0.0, row["source"]
        assert score(world, row, answer(row["answer"])) == 1.0


def test_the_last_answer_is_found_at_once(world: ReasoningGym, one_process: None) -> None:
    (row,) = ReasoningGymTasks(datasets="gcd", size=1).rows()
    right = f"<answer>{row['answer']}</answer>"
    began = time.process_time()
    assert score(world, row, "<answer>" * 100_000) == 0.0
    assert score(world, row, f"<answer>x</answer> {right} or not</answer> <answer>") == 1.0
    assert score(world, row, f"{right}<answer>{right}") < 1.0
    assert time.process_time() - began < 5


def test_held_out_tasks_differ(one_process: None) -> None:
    mixed = {"leg_counting": {}, "tower_of_hanoi": {"weight": 0.5}, "word_ladder": {"weight": 1.3}}
    several = [
        {row["question"] for row in ReasoningGymTasks(datasets=mixed, size=size, skip=skip, seed=1).rows()}
        for size, skip in ((40, 0), (20, 40), (60, 0))
    ]
    train, held_out, whole = several
    assert [len(questions) for questions in several] == [40, 20, 60]
    assert train | held_out == whole
    # in the library, task i + 1 of a seed is task i of the next
    seeds = [ReasoningGymTasks(datasets="leg_counting", size=50, seed=seed).rows() for seed in (0, 1)]
    assert not {row["question"] for row in seeds[0]} & {row["question"] for row in seeds[1]}


@pytest.mark.parametrize(
    ("datasets", "told"),
    [
        ("leg_countin", ".leg_countin: reasoning-gym has no such data set; fix: did you mean leg_counting?"),
        (
            "game_of_life_halting",
            ".game_of_life_halting: its verifier gives a full score to any answer, such as '?'; fix: leave it out",
        ),
        (
            {"spell_backward": {"options": {"data_file": "/etc/passwd"}}},
            ".spell_backward.options.data_file: got '/etc/passwd'; fix: name a file of reasoning-gym",
        ),
        (
            {"caesar_cipher": {"level": 3}},
            ".caesar_cipher.level: got 3, whose options it refuses: AssertionError: rotation must be in range [1,25]",
        ),
        (
            {"gcd": {"options": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 3}}},
            ".gcd: it has 9 different tasks in 1600 with these options, not 50; fix: lower size",
        ),
    ],
)
def test_errors_name_the_field_and_the_fix(datasets: Any, told: str, one_process: None) -> None:
    with pytest.raises(SettingError) as caught:
        ReasoningGymTasks(datasets=datasets, size=50).rows()
    assert str(caught.value).startswith(f"reasoning_gym.datasets{told}")


@pytest.mark.long
def test_every_data_set_is_generated_and_verified(world: ReasoningGym, tmp_path: Path) -> None:
    names = sorted(data_set_names() - REFUSED)
    assert len(names) >= 104
    rows = ReasoningGymTasks(datasets=names, size=2 * len(names), seed=5).rows()
    assert Counter(row["source"] for row in rows) == dict.fromkeys(names, 2)
    assert {row["source"] for row in rows if row["answer"] is None} == UNANSWERED
    touched = tmp_path / "touched"
    code = f"__import__('pathlib').Path({str(touched)!r}).touch()"
    wrong = ["wrong", "-17.25", "", "\ud800[{", code, f"[{code}]", f"[[{code}]]", f"({code})", f"1+{code}"]
    for row in rows:
        if row["answer"] is not None:
            assert score(world, row, answer(row["answer"])) == 1.0, row
        wrongs = [score(world, row, answer(text)) for text in wrong]
        assert all(0.0 <= value <= 1.0 for value in wrongs)
        assert max(wrongs) < 1.0, (row, wrongs)
    # no verifier has run a part of an answer
    assert not touched.exists()


def perturbed(text: str) -> list[str]:
    """The stored answer, and answers near it that people write. None calls a function that the answer does not."""
    changes = ["*| * ", "+| + ", " |", "1|2", "+|-", "*|/", "**|^", "/|//", "x|y"]
    changed = [text.replace(*change.split("|")) for change in changes]
    near = [
        *(f"({text})", f"-{text}", f"{text}.", f"{text}+0", f"{text}*1", f"{text} = 24", f"1.0*{text}"),
        f"{text} + C",
    ]
    about = [f"The answer is {text}", f"'{text}'", f"[{text}]", text[:-1], text[::-1], text.upper(), f"{text}\n{text}"]
    return [text, *changed, *near, *about, str(list(text)), str([line.split() for line in text.split("\n")])]


@pytest.mark.long
def test_honest_and_perturbed_answers_score_as_in_the_library(world: ReasoningGym) -> None:
    names = sorted(data_set_names() - REFUSED - UNANSWERED)
    rows = ReasoningGymTasks(datasets=names, size=2 * len(names), seed=11).rows()
    asked = [(row["reasoning_gym"], [text.strip() for text in perturbed(row["answer"])]) for row in rows]
    command = [sys.executable, "-m", "tests.worlds.reasoning_gym.library_verdicts"]
    lines = "".join(f"{json.dumps(each)}\n" for each in asked)
    told = subprocess.run(command, input=lines, env=os.environ | gym_tasks.VARIABLES, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    for row, (_, answers), line in zip(rows, asked, told.stdout.splitlines(), strict=True):
        ours = [score(world, row, answer(text)) for text in answers]
        assert list(zip(answers, ours, strict=True)) == list(zip(answers, json.loads(line), strict=True)), row["source"]

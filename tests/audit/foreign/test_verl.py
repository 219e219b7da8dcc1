"""Runs of verl. The files in data/verl were written by verl's own functions, taken out of its source and called with
made-up samples: `_dump_generations` of verl/trainer/ppo/ray_trainer.py in 0.4.1 and 0.7.1, `_write_generations` of
verl/trainer/ppo/v1/trainer_base.py in 0.9.1, and the lines of `FileLogger` in verl/utils/tracking.py. In 0.4.1 and
0.7.1 the rows of a step are mixed, as `_balance_batch` leaves them."""

import json
from pathlib import Path

import pytest

from agentfactory.audit.foreign import read
from agentfactory.audit.record import CALLS, HELD_OUT, METRICS
from agentfactory.base.errors import SettingError
from agentfactory.base.findings import Severity
from tests.audit.foreign.reading import copied, groups_of, record_of


@pytest.mark.parametrize("version", ["0.4.1", "0.7.1", "0.9.1"])
def test_groups_are_those_of_a_prompt_in_a_step(version: str) -> None:
    groups = [seen for seen in groups_of(f"verl/{version}") if not seen.held_out]
    assert [(seen.step, len(seen.group.trajectories)) for seen in groups] == [(1, 4), (1, 4), (2, 4), (2, 4)]
    for seen in groups:
        assert len({chain.messages[0]["content"] for chain in seen.group.trajectories}) == 1
        assert [chain.reward for chain in seen.group.trajectories].count(0.0) in (1, 2)
    chain = groups[0].group.trajectories[0]
    assert [message["role"] for message in chain.messages] == ["user", "assistant"]
    assert (chain.rows, chain.turns, chain.messages[1]["content"][:6]) == ([], 1, "It is ")
    assert CALLS in record_of(f"verl/{version}").lacks


def test_what_the_reward_function_returned_is_kept() -> None:
    seen = groups_of("verl/0.7.1/rollouts")[0]
    assert seen.group.task == {"prompt": "system\nAdd.\nuser\n2 + 3 =\nassistant\n", "gts": "5"}
    assert all(chain.metrics == {"acc": chain.reward} for chain in seen.group.trajectories)


def test_validations_beside_training_are_held_out() -> None:
    groups = groups_of("verl/0.7.1")
    assert [seen.step for seen in groups if not seen.held_out] == [1, 1, 2, 2]
    assert [seen.step for seen in groups if seen.held_out == "sampled"] == [0, 0, 2, 2]
    # alone they are the run
    alone = groups_of("verl/0.7.1/validation")
    assert [(seen.held_out, seen.step) for seen in alone] == [("", None)] * 4
    assert HELD_OUT in record_of("verl/0.7.1/validation").lacks


def test_metrics_are_those_of_the_file_logger() -> None:
    record = record_of("verl/0.7.1")
    figures = [(line["step"], line["grad_norm"], line["reward"]) for line in record.metrics]
    assert figures == [(1, 0.5, 0.75), (2, 0.25, 0.625)]
    assert "file logger" in record_of("verl/0.4.1").lacks[METRICS]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    folder = copied("verl/0.4.1", tmp_path)
    file = folder / "rollouts" / "2.jsonl"
    first, *others = file.read_text().splitlines(keepends=True)
    line = '{"input": "a", "output": "b", "step": 2, "score": "high"}\n'
    file.write_text("".join([first, line, *others]))
    problem = r"Expected `float`, got `str` - at `\$.score`"
    with pytest.raises(SettingError, match=rf"line 2 of .*2.jsonl cannot be read: {problem}; fix: copy the file"):
        read(folder)


def test_a_score_that_is_no_number_is_found(tmp_path: Path) -> None:
    folder = copied("verl/0.4.1", tmp_path)
    with (folder / "rollouts" / "2.jsonl").open("a") as file:
        # as Python's json writes it
        file.write(json.dumps({"input": "a", "output": "b", "score": float("nan"), "step": 2}) + "\n")
    (finding,) = record_of(folder).problems
    assert (finding.severity, finding.text) == (Severity.WRONG, "1 chains have a reward that is not a number")
    assert groups_of(folder)[-1].group.trajectories[0].reward is None

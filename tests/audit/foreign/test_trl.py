"""Runs of TRL. The files in data/trl are of GRPOTrainer in TRL 1.16, with num_generations=4: `chat` on messages, `text`
on texts with reward_weights=[1.0, 0.5], steps_per_generation=2 and evaluations, `tools` with a tool that raises.

Runs of verl. The files in data/verl were written by verl's own functions, taken out of its source and called with
made-up samples: `_dump_generations` of verl/trainer/ppo/ray_trainer.py in 0.4.1 and 0.7.1, `_write_generations` of
verl/trainer/ppo/v1/trainer_base.py in 0.9.1, and the lines of `FileLogger` in verl/utils/tracking.py. In 0.4.1 and
0.7.1 the rows of a step are mixed, as `_balance_batch` leaves them."""

import json
from pathlib import Path

import pytest
from pyarrow import parquet

from agentfactory.audit.foreign import read
from agentfactory.audit.record import CALLS, HELD_OUT, METRICS, OUTCOMES, TOKENS, TRAINED
from agentfactory.base.errors import SettingError
from agentfactory.base.findings import Severity
from tests.audit.foreign.reading import audited, copied, groups_of, record_of


def test_groups_are_those_of_a_prompt_in_a_step() -> None:
    groups = groups_of("trl/chat")
    assert [(seen.group.id, seen.step, len(seen.group.trajectories)) for seen in groups] == [
        (f"step-{step}.{place}", step, 4) for step in (1, 2, 3) for place in (0, 1)
    ]
    assert all(seen.group.version == (seen.step or 0) - 1 and not seen.held_out for seen in groups)
    assert groups[0].file == "completions/completions_00001.parquet"


def test_a_prompt_that_the_data_repeats_has_two_groups(tmp_path: Path) -> None:
    folder = copied("trl/chat", tmp_path)
    file = folder / "completions" / "completions_00002.parquet"
    table = parquet.read_table(file)
    prompts = table.column("prompt").to_pylist()
    again = table.set_column(1, "prompt", [[*prompts[:4], *prompts[:4]]])
    parquet.write_table(again, file)
    found = [seen.group.id for seen in groups_of(folder) if seen.step == 2]
    assert found == ["step-2.0", "step-2.1"]


def test_messages_rewards_and_extra_columns() -> None:
    seen = groups_of("trl/chat")[0]
    chain = seen.group.trajectories[0]
    assert [message["role"] for message in chain.messages] == ["system", "user", "assistant"]
    assert chain.messages[1]["content"] == "What is 4 + 0?"
    assert (chain.rows, chain.turns) == ([], 1)
    # `log_extra` added the column
    assert seen.group.task == {"prompt": chain.messages[:2], "answer": "4"}
    assert chain.metrics.keys() == {"reward/digits", "reward/short"}
    assert chain.reward == pytest.approx(sum(chain.metrics.values()))
    advantages = [seen.credit[each.id][0]["advantage"][0] for each in seen.group.trajectories]
    assert sum(advantages) == pytest.approx(0, abs=1e-5)


async def test_what_cannot_be_checked_is_said() -> None:
    report = await audited("trl/chat")
    why = {each.topic: each.why for each in report.unchecked}
    assert why["tokens and masks"] == "TRL's completions have texts and no token ids"
    assert {"weights", "chains lost", "format"} <= why.keys()
    assert report.looked_at["rewards"] == "24 chains"
    assert not report.of(Severity.WRONG)
    assert {TOKENS, TRAINED, OUTCOMES, HELD_OUT} <= record_of("trl/chat").lacks.keys()


def test_calls_and_results_become_messages() -> None:
    chain = groups_of("trl/tools")[2].group.trajectories[0]
    first, second = chain.messages[1], chain.messages[2]
    call = {"name": "move", "arguments": {"direction": "north"}}
    assert first["tool_calls"] == [{"type": "function", "function": call, "id": "call-1"}]
    assert second == {"role": "tool", "content": "{'error': 'a wall'}", "name": "move", "tool_call_id": "call-1"}
    answered = [message["tool_call_id"] for message in chain.messages if message["role"] == "tool"]
    assert answered == ["call-1", "call-2", "call-3"]
    # a tool that raised
    assert chain.errors == ["move: {'error': 'a wall'}"]
    # the last call was not made: max_tool_calling_iterations
    assert (chain.turns, chain.messages[-1]["tool_calls"][0]["id"]) == (4, "call-4")


def test_tables_that_an_evaluation_has_overwritten_are_left_out() -> None:
    groups = groups_of("trl/text")
    assert {seen.step for seen in groups} == {1, 3}
    (note,) = [each for each in record_of("trl/text").problems if each.topic == "its files"]
    assert note.severity is Severity.NOTE
    assert [each.file for each in note.evidence] == [f"completions/completions_0000{step}.parquet" for step in (2, 4)]


def test_the_logged_means_tell_the_weights() -> None:
    chain = groups_of("trl/text")[0].group.trajectories[0]
    digits, short = chain.metrics["reward/digits"], chain.metrics["reward/short"]
    assert chain.reward == pytest.approx(digits + 0.5 * short)
    notes = [each.text for each in record_of("trl/text").problems if each.topic == "rewards"]
    assert notes == ["the logged means tell the weights of the rewards: 1 of digits, 0.5 of short"]


def test_a_logged_reward_that_is_not_the_completions_is_said(tmp_path: Path) -> None:
    folder = copied("trl/chat", tmp_path)
    names = ("reward", "rewards/digits/mean")
    change(folder, lambda s: s["log_history"][1].update({name: s["log_history"][1][name] + 1 for name in names}))
    (note,) = record_of(folder).problems
    assert note.text == "in 1 of 3 steps the logged reward is not the mean of the saved completions"
    assert note.evidence[0].text == "step 2: 1.2 logged, 0.2 saved"


def test_a_table_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = copied("trl/chat", tmp_path)
    table = folder / "completions" / "completions_00003.parquet"
    table.write_bytes(table.read_bytes()[:3000])
    assert {seen.step for seen in groups_of(folder)} == {1, 2}
    assert "the last table is left out" in record_of(folder).problems[0].text
    for other in (folder / "completions").glob("*[12].parquet"):
        other.unlink()
    with pytest.raises(SettingError, match=r"completions_00003.parquet cannot be read"):
        read(folder)


@pytest.mark.parametrize(
    ("damaged", "problem"),
    [
        ("completions/completions_00002.parquet", r"completions_00002.parquet cannot be read: .*; fix: copy the file"),
        ("checkpoint-3/trainer_state.json", r"trainer_state.json cannot be read: .*; fix: copy the file again"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damaged: str, problem: str) -> None:
    folder = copied("trl/chat", tmp_path)
    (folder / damaged).write_bytes(b"{")
    with pytest.raises(SettingError, match=problem):
        read(folder)


def change(folder: Path, edit: object) -> None:
    (file,) = folder.glob("checkpoint-*/trainer_state.json")
    state = json.loads(file.read_text())
    edit(state)  # type: ignore[operator]
    file.write_text(json.dumps(state))


# ---- verl


@pytest.mark.parametrize("version", ["0.4.1", "0.7.1", "0.9.1"])
def test_verls_groups_are_those_of_a_prompt_in_a_step(version: str) -> None:
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

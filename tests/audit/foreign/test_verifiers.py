"""Evaluations of verifiers. The files in data/verifiers are of real ones: `vf-eval` of verifiers 0.4.0 and `vf-eval
--save-results` of 0.1.14, with a tool and a scripted model, of which some lines are left: the chains of a task, and one
whose model failed."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentfactory.audit.foreign import read
from agentfactory.audit.record import HELD_OUT, METRICS, TOKENS, TRAINED
from agentfactory.base.errors import SettingError
from agentfactory.base.findings import Severity
from agentfactory.rollout.trajectory import Outcome
from tests.audit.foreign.reading import audited, copied, groups_of, record_of


def test_chains_of_a_task_are_a_group() -> None:
    groups = groups_of("verifiers/0.4")
    assert {seen.group.id: len(seen.group.trajectories) for seen in groups} == {"task-0": 3, "task-4": 1}
    # they are the run itself, not a part beside training
    assert all((seen.held_out, seen.step, seen.credit) == ("", None, {}) for seen in groups)
    assert {HELD_OUT, TRAINED, METRICS, TOKENS} <= record_of("verifiers/0.4").lacks.keys()


def test_messages_calls_rewards_and_metrics() -> None:
    seen = next(seen for seen in groups_of("verifiers/0.4") if seen.group.id == "task-0")
    assert (seen.group.task["prompt"], seen.group.task["answer"]) == ("0 + 1 =", 1)
    chain = seen.group.trajectories[0]
    assert [message["role"] for message in chain.messages] == ["system", "user", "assistant", "tool", "assistant"]
    (call,) = chain.messages[2]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 0, "b": 1}}
    assert chain.messages[3] == {"role": "tool", "content": "1", "name": "add", "tool_call_id": call["id"]}
    assert (chain.turns, chain.outcome, chain.rows) == (2, Outcome.COMPLETED, [])
    assert chain.metrics == {"characters": 8.0, "reward/right": 0.0, "reward/brief": 1 / 9}
    # the weights are 2 and 0.5
    assert [each.reward for each in seen.group.trajectories] == pytest.approx([1 / 18, 2 + 1 / 18, 1 / 18])


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"stop_condition": "max_turns"}, Outcome.MAX_TURNS),
        ({"stop_condition": "max_output_tokens"}, Outcome.MAX_TOKENS),
        ({"stop_condition": "max_total_tokens"}, Outcome.CONTEXT_OVERFLOW),
        ({"stop_condition": "agent_timeout", "is_timeout": True}, Outcome.TIMEOUT),
        ({"stop_condition": "toolset_error", "errors": [{"type": "ToolsetError"}]}, Outcome.TOOL_INFRASTRUCTURE),
        ({"stop_condition": "task_error", "errors": [{"type": "TaskError"}]}, Outcome.AGENT_ERROR),
        ({"stop_condition": "agent_completed", "calls": [{"finish_reason": "length"}]}, Outcome.MAX_TOKENS),
        ({"stop_condition": "agent_completed"}, Outcome.COMPLETED),
    ],
)
def test_how_a_chain_ended(tmp_path: Path, fields: dict[str, Any], outcome: Outcome) -> None:
    row = {"id": "e", "traces": [{"id": "t", **fields}]}
    (tmp_path / "traces.jsonl").write_text(json.dumps(row) + "\n")
    assert groups_of(tmp_path)[0].group.trajectories[0].outcome is outcome


def test_judges_are_no_chains_and_agents_have_groups_of_their_own(tmp_path: Path) -> None:
    seats = [{"name": "white"}, {"name": "black"}, {"name": "judge", "trainable": False}]
    traces = [[{"id": f"{n}-{seat['name']}", "agent": seat} for seat in seats] for n in range(2)]
    rows = [{"id": f"e{n}", "task": {"key": "chess"}, "traces": given} for n, given in enumerate(traces)]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {seen.group.id: [chain.id for chain in seen.group.trajectories] for seen in groups_of(tmp_path)}
    assert found == {"chess:white": ["0-white", "1-white"], "chess:black": ["0-black", "1-black"]}


def test_rows_of_an_example_are_a_group() -> None:
    first, failed = groups_of("verifiers/0.1")
    assert (first.group.id, len(first.group.trajectories), failed.group.id) == ("task-0", 3, "task-4")
    assert first.group.task["answer"] == "1"
    chain = first.group.trajectories[1]
    # each call is saved as a text
    (call,) = chain.messages[2]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 0, "b": 1}}
    assert (chain.messages[3]["name"], chain.turns, chain.reward) == ("add", 2, 1.0)
    assert chain.metrics["total_tool_calls"] == 1.0


async def test_a_chain_that_failed_counts_as_0_there_and_is_found() -> None:
    report = await audited("verifiers/0.1")
    (finding,) = report.of(Severity.WRONG)
    assert finding.text.startswith("1 chains that failed have a reward")
    assert finding.evidence[0].text == "it ended as inference_error, and has the reward 0"


@pytest.mark.parametrize(
    ("file", "edit", "problem"),
    [
        ("0.4/traces.jsonl", {"traces": [{"nodes": []}]}, r"missing required field `id` - at `\$.traces\[0\]`"),
        (
            "0.4/traces.jsonl",
            {"traces": [{"id": "t", "nodes": [{"message": {"role": "user"}, "parent": 0}]}]},
            "the parent of node 0 is 0; it has to be a node before it",
        ),
        ("0.1/results.jsonl", {"completion": [{"role": "assistant", "tool_calls": ["{"]}]}, "EOF while parsing"),
        ("0.1/results.jsonl", {"reward": "much"}, r"Expected `float \| null`, got `str` - at `\$.reward`"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, file: str, edit: dict[str, Any], problem: str) -> None:
    folder = copied(f"verifiers/{Path(file).parent}", tmp_path)
    path = folder / Path(file).name
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **edit})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(SettingError, match=rf"line 2 of .*{path.name} cannot be read: .*{problem}.*; fix: copy"):
        read(folder)


def test_an_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    folder = copied("verifiers/0.4", tmp_path)
    content = (folder / "traces.jsonl").read_bytes()
    (folder / "traces.jsonl").write_bytes(content[:-100])
    assert sum(len(seen.group.trajectories) for seen in groups_of(folder)) == 3


def test_other_traces_are_not_of_verifiers(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text('{"span": 1}\n')
    assert read(tmp_path) is None

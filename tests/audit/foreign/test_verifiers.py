"""Evaluations of verifiers. The files in data/verifiers are of real ones: `vf-eval` of verifiers 0.4.0 and `vf-eval
--save-results` of 0.1.14, with a tool and a scripted model, of which some lines are left: the chains of a task, and one
whose model failed.

Runs of prime-rl. The files in data/prime_rl were written as its orchestrator does, from episodes of the classes of
verifiers 0.4.0 with made-up tokens (`Episode.to_record`):

- `steps`: `FileMonitor.log_episodes` and `log` of src/prime_rl/monitors/file.py at 0.9.1.dev28;
- `annotated`: `FileMonitor.log_episodes` and `_effective_update` of the version after it;
- `stream`: `ChunkedJsonl` and `seal` of monitors/file/traces/chunks.py, `make_update` of traces/update.py,
  `stamp_arrival` and `stamp_ship` of orchestrator/annotations.py.

In each run, chains of a task have the version `step - 1`, and one chain of step 2 failed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentfactory.audit.foreign import read
from agentfactory.audit.record import HELD_OUT, LOGPROBS, METRICS, TOKENS, TRAINED, Seen
from agentfactory.base.errors import SettingError
from agentfactory.base.findings import Severity
from agentfactory.rollout.token_row import Span
from agentfactory.rollout.trajectory import Outcome
from tests.audit.foreign.reading import DATA, audited, copied, groups_of, record_of


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


# ---- prime-rl


RUNS = ["prime_rl/steps", "prime_rl/stream", "prime_rl/annotated"]


def trained(path: str | Path) -> list[Seen]:
    return [seen for seen in groups_of(path) if not seen.held_out]


@pytest.mark.parametrize("run", RUNS)
def test_groups_have_the_step_that_trained_them(run: str) -> None:
    for seen in trained(run):
        assert seen.step in (1, 2)
        assert (seen.group.version, seen.group.source) == (seen.step - 1, "sums")
        assert len(seen.group.trajectories) == 3
        assert seen.group.task["prompt"] == seen.group.trajectories[0].messages[1]["content"] or seen.step == 2
    assert TOKENS not in record_of(run).lacks
    assert LOGPROBS not in record_of(run).lacks


@pytest.mark.parametrize("run", RUNS)
def test_rows_have_the_tokens_of_all_turns(run: str) -> None:
    chain = next(c for seen in trained(run) for c in seen.group.trajectories if c.turns == 2)
    (row,) = chain.rows
    row.check_logprobs()
    assert row.token_ids[:3] == [1, 2, 3]
    assert row.turn_spans() == [(9, 14), (20, 24)]
    assert chain.turn_spans() == [(0, 9, 14), (0, 20, 24)]
    assert list(np.flatnonzero(row.mask)) == [*range(9, 14), *range(20, 24)]
    assert all((logprob < 0) == bool(sampled) for logprob, sampled in zip(row.logprobs, row.mask, strict=True))
    assert row.versions in ([Span(f"step-{version}", 9, 14), Span(f"step-{version}", 20, 24)] for version in (0, 1))


@pytest.mark.parametrize("run", RUNS)
def test_advantages_are_those_of_the_sampled_tokens(run: str) -> None:
    for seen in trained(run):
        rewards = {chain.id: chain.reward for chain in seen.group.trajectories if chain.reward is not None}
        mean = sum(rewards.values()) / len(rewards)
        assert seen.credit.keys() == rewards.keys()
        for chain in seen.group.trajectories:
            for noted in seen.credit.get(chain.id, ()):
                assert noted["targets"] == list(np.flatnonzero(chain.rows[noted["row"]].mask))
                assert noted["advantage"] == pytest.approx([rewards[chain.id] - mean] * len(noted["targets"]), abs=1e-4)
                assert ("proximal" in noted) == (run == "prime_rl/stream")


async def test_weights_are_checked() -> None:
    report = await audited("prime_rl/stream")
    assert report.looked_at["weights"] == "64 trained tokens, 64 of the newest weights"
    assert not report.of(Severity.WRONG)
    assert [each.topic for each in report.unchecked if "recipe" not in each.why] == ["format"]


async def test_a_server_with_old_weights_is_found(tmp_path: Path) -> None:
    folder = copied("prime_rl/stream", tmp_path)
    file = folder / "monitors/file/traces/annotations/trainer/00000.jsonl"
    notes = [json.loads(line) for line in file.read_text().splitlines()]
    for note in notes:
        for branch in note["branches"]:
            branch["trainer_logprobs"] = [None if value is None else value - 1 for value in branch["trainer_logprobs"]]
    file.write_text("".join(json.dumps(note) + "\n" for note in notes))
    (finding,) = (await audited(folder)).of(Severity.WRONG)
    assert finding.text.startswith("server and trainer differ by 1 nats a token")


def test_evaluations_are_held_out() -> None:
    for run in RUNS[:2]:
        (seen,) = [seen for seen in groups_of(run) if seen.held_out]
        assert (seen.held_out, seen.step, len(seen.group.trajectories), seen.credit) == ("sampled", 1, 2, {})
        assert seen.group.id.startswith("step-1:")
    assert HELD_OUT in record_of("prime_rl/annotated").lacks


def test_lines_of_metrics_are_joined_by_step() -> None:
    for run in RUNS[:2]:
        lines = record_of(run).metrics
        figures = [(line["step"], line["grad_norm"], line["reward"]) for line in lines]
        assert figures == [(1, 0.5, 1.25), (2, 0.25, 1.25)]
    assert METRICS in record_of("prime_rl/annotated").lacks


def test_a_branch_becomes_a_row(tmp_path: Path) -> None:
    def node(parent: int | None, role: str, ids: list[int], sampled: bool = False) -> dict[str, object]:
        mask = [False, *[sampled] * (len(ids) - 1)]
        values = {"logprobs": [-1.0] * sum(mask), "advantages": [0.5] * sum(mask)} if sampled else {}
        message = {"role": role, "content": role}
        return {"parent": parent, "message": message, "sampled": sampled, "token_ids": ids, "mask": mask, **values}

    nodes = [
        node(None, "user", [1, 2]),
        node(0, "assistant", [3, 4, 5], sampled=True),
        node(1, "user", [6]),
        node(2, "assistant", [7, 8], sampled=True),
        # the history before was shortened
        node(1, "user", [9]),
        node(4, "assistant", [10, 11], sampled=True),
    ]
    info = {"train": {"trained_at_step": 4}}
    work = {"type": "train", "step": 4, "policy": {"start": 2, "end": 3}}
    row = {"id": "e", "traces": [{"id": "t", "nodes": nodes, "info": info}], "run": {"work": work}}
    file = tmp_path / "traces/step_4/train/traces.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(row) + "\n")
    (seen,) = groups_of(tmp_path)
    (chain,) = seen.group.trajectories
    assert [list(row.token_ids) for row in chain.rows] == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 9, 10, 11]]
    # the turn that both share was sampled once
    assert chain.turn_spans() == [(0, 3, 5), (0, 7, 8), (1, 7, 8)]
    assert [(noted["row"], noted["targets"]) for noted in seen.credit["t"]] == [(0, [3, 4, 7]), (1, [7])]
    assert chain.rows[0].versions[0] == Span("step-2", 3, 5, mixed=True)
    assert (chain.turns, seen.step) == (3, 4)


def test_the_first_files(tmp_path: Path) -> None:
    """Rows of verifiers 0.1, by `save_rollouts` of src/prime_rl/utils/vf.py, without `trajectory`."""
    folder = tmp_path / "run_default/rollouts/step_3"
    folder.mkdir(parents=True)
    lines = (DATA / "verifiers/0.1/results.jsonl").read_text().splitlines()
    rows = [{**json.loads(line), "env_id": "sums", "is_filtered": False} for line in lines]
    (folder / "train_rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "eval_rollouts.jsonl").write_text(json.dumps(rows[0]) + "\n")
    (folder / "train_rollouts.bin").write_bytes(b"\x00")
    groups = groups_of(tmp_path)
    assert [(seen.group.id, seen.step, seen.held_out) for seen in groups] == [
        ("step-3:sums:0", 3, ""),
        ("step-3:sums:4", 3, ""),
        ("step-3:sums:0", 3, "sampled"),
    ]
    assert {TOKENS, TRAINED, METRICS} <= record_of(tmp_path).lacks.keys()


def test_tokens_without_masks_or_with_log_probabilities_of_others_are_named(tmp_path: Path) -> None:
    folder = copied("prime_rl/annotated", tmp_path)
    change(folder, lambda node: node["mask"].pop())
    problem = "node 1 has 4 token ids and 3 values of its mask"
    with pytest.raises(SettingError, match=rf"line 1 of .*traces.jsonl cannot be read: {problem}; fix: copy"):
        read(folder)
    change(folder, lambda node: (node["mask"].append(False), node.update(logprobs=[-1.0])))
    with pytest.raises(SettingError, match="node 1 has 0 sampled tokens and 1 logprobs; fix: copy"):
        read(folder)


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    folder = copied("prime_rl/stream", tmp_path)
    file = folder / "monitors/file/traces/stream/00000.jsonl.zst"
    file.write_bytes(file.read_bytes()[:100] + b"damage" + file.read_bytes()[106:])
    with pytest.raises(SettingError, match=r"line 1 of .*00000.jsonl.zst cannot be read: .*; fix: copy the file"):
        read(folder)


def change(folder: Path, edit: object) -> None:
    """Edit the second node of the first chain of the run `annotated`."""
    file = folder / "traces/step_1/train/traces.jsonl"
    first, *others = file.read_text().splitlines(keepends=True)
    row = json.loads(first)
    edit(row["traces"][0]["nodes"][1])  # type: ignore[operator]
    file.write_text("".join([json.dumps(row) + "\n", *others]))

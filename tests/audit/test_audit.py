"""`agentfactory audit`: nothing in a healthy run, and each planted fault by its topic and place."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentfactory.audit.audit import audit
from agentfactory.audit.reports import Report
from agentfactory.audit.run_record import records_of
from agentfactory.base.findings import Evidence, Finding, Severity
from agentfactory.commands.main import main
from agentfactory.rollout.groups.group_files import append_group, delete_groups, read_groups
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory

CHECKED = {
    *(
        "the end of the run",
        "weights",
        "tokens and masks",
        "trained tokens",
        "rewards",
        "chains played again",
        "metrics",
        "tasks",
    ),
    *("chains lost", "groups", "tool calls", "format", "lengths", "greedy chains"),
}


@pytest.fixture(scope="module")
def run(quickstart_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the short quickstart."""
    folder = tmp_path_factory.mktemp("audit") / "run"
    shutil.copytree(quickstart_run, folder, symlinks=True)
    return folder


@pytest.fixture
def stage(run: Path) -> Iterator[Path]:
    """The second stage of a run whose files may be changed."""
    kept = run.with_name("kept")
    shutil.copytree(run / "grpo", kept, symlinks=True)
    yield run / "grpo"
    shutil.rmtree(run / "grpo")
    kept.rename(run / "grpo")


def audited(run: Path) -> Report:
    (record,) = [record for record in records_of(run) if record.name.endswith("grpo")]
    return asyncio.run(audit(record))


def rewrite(stage: Path, change: Callable[[list[Group]], object], name: str = "train.jsonl") -> None:
    """Change the groups of a file."""
    file = stage / "trajectories" / name
    groups = list(read_groups(file))
    for group in groups:
        for row in (row for chain in group.trajectories for row in chain.rows):
            for stream in ("token_ids", "mask", "logprobs"):
                setattr(row, stream, np.array(getattr(row, stream)))
    changed = change(groups)
    delete_groups(file)
    for group in changed if isinstance(changed, list) else groups:
        append_group(file, group)


def rewrite_lines(file: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def test_a_healthy_run_has_no_findings(run: Path) -> None:
    report = audited(run)
    assert [finding for finding in report.findings if finding.severity is not Severity.NOTE] == []
    assert set(report.looked_at) == CHECKED
    assert [one.topic for one in report.unchecked] == ["rewards computed again"]


def chains_of(groups: list[Group]) -> Iterator[Trajectory]:
    return (chain for group in groups for chain in group.trajectories)


def train_context(groups: list[Group]) -> None:
    for chain in chains_of(groups):
        chain.rows[0].mask[0] = 1


def change_ids(groups: list[Group]) -> None:
    for chain in chains_of(groups):
        chain.rows[0].token_ids[3] += 1


def edit_messages(groups: list[Group]) -> None:
    for chain in chains_of(groups):
        next(message for message in chain.messages if message["role"] == "assistant")["content"] = "I never said this."


def edit_results(groups: list[Group]) -> None:
    for chain in chains_of(groups):
        for message in chain.messages:
            if message["role"] == "tool":
                message["content"] = "You see nothing."


def change_rewards(groups: list[Group]) -> None:
    for chain in chains_of(groups):
        chain.reward = None if chain.reward is None else chain.reward + 0.25


def reward_failures(groups: list[Group]) -> None:
    groups[0].trajectories[1].outcome = Outcome.TOOL_INFRASTRUCTURE


def repeat_a_group(groups: list[Group]) -> list[Group]:
    return [*groups, groups[0]]


def leave_out_a_group(groups: list[Group]) -> list[Group]:
    groups.sort(key=lambda group: group.id)
    return [*groups[:1], *groups[2:]]


def exchange_tasks(groups: list[Group]) -> None:
    groups[0].task, groups[1].task = groups[1].task, groups[0].task


def heat_the_server(groups: list[Group]) -> None:
    """The server's log-odds are half of the trainer's, as those of two tokens at the temperature 2."""
    for chain in chains_of(groups):
        row = chain.rows[0]
        certain = np.minimum(row.logprobs, -1e-6)
        odds = (certain - np.log1p(-np.exp(certain))) / 2
        row.logprobs = np.where(row.mask, -np.log1p(np.exp(-odds)), 0.0)


def shift_logprobs(groups: list[Group]) -> None:
    for chain in chains_of(groups):
        chain.rows[0].logprobs = chain.rows[0].logprobs - 0.3 * chain.rows[0].mask


def name_other_weights(groups: list[Group]) -> None:
    for chain in chains_of(groups):
        chain.rows[0].versions[0].version = "another-run-v0"


def sample_the_same(groups: list[Group]) -> None:
    for group in groups:
        first = group.trajectories[0]
        for chain in group.trajectories:
            chain.rows, chain.messages, chain.turns, chain.anchors = (
                first.rows,
                first.messages,
                first.turns,
                first.anchors,
            )


def lose_chains(groups: list[Group]) -> None:
    for chain in list(chains_of(groups))[::3]:
        chain.outcome, chain.reward, chain.error = Outcome.TIMEOUT, None, "the chain took longer than 3 s"


def lose_a_task(groups: list[Group]) -> list[Group]:
    first, again = groups[0], Group(f"{groups[0].id}-1", groups[0].task, groups[0].trajectories, groups[0].version)
    for chain in first.trajectories:
        chain.outcome, chain.reward, chain.error = Outcome.AGENT_ERROR, None, "no"
    return [*groups, again]


def leave_calls_unanswered(groups: list[Group]) -> None:
    for chain in chains_of(groups):
        answers = [index for index, message in enumerate(chain.messages) if message["role"] == "tool"]
        if len(answers) > 2:
            del chain.messages[answers[0]]


PLANTED = [
    (train_context, "tokens and masks", "masks differ", ", token 0"),
    (change_ids, "tokens and masks", "token ids differ", ", token 3"),
    (edit_messages, "tokens and masks", "read as another message", "token"),
    (edit_results, "tokens and masks", "token ids differ", "token"),
    (edit_results, "chains played again", "do something else", "chain"),
    (change_rewards, "chains played again", "have another reward", "chain"),
    (change_rewards, "metrics", "report another reward", "metrics.jsonl"),
    (reward_failures, "rewards", "1 chains that failed have a reward", "chain"),
    (repeat_a_group, "tasks", "1 groups were saved twice", "group g"),
    (leave_out_a_group, "tasks", "1 places of ", "group g000001"),
    (exchange_tasks, "tasks", "2 groups have another task", "group g"),
    (heat_the_server, "weights", "server and trainer differ", "token"),
    (shift_logprobs, "weights", "server and trainer differ", "token"),
    (name_other_weights, "weights", "by weights that this run did not publish", "token"),
    (sample_the_same, "groups", "all chains are the same", "chain"),
    (lose_chains, "chains lost", "ended as timeout", "chain"),
    (lose_a_task, "tasks", "all groups of 1 of ", ""),
    (leave_calls_unanswered, "tool calls", "have no answer", "chain"),
]


def found(report: Report, topic: str, words: str) -> Finding:
    of_topic = [finding for finding in report.findings if finding.topic == topic]
    matching = [finding for finding in of_topic if words in finding.text]
    assert matching, (topic, words, [(finding.topic, finding.text) for finding in report.findings])
    return matching[0]


@pytest.mark.parametrize(("plant", "topic", "words", "place"), PLANTED)
def test_a_fault_is_found_with_its_place(
    run: Path, stage: Path, plant: Callable[[list[Group]], Any], topic: str, words: str, place: str
) -> None:
    rewrite(stage, plant)
    finding = found(audited(run), topic, words)
    assert finding.severity is not Severity.NOTE
    assert finding.fix
    assert place in finding.evidence[0].place


def test_the_cause_of_a_difference_of_weights_is_told(run: Path, stage: Path) -> None:
    rewrite(stage, heat_the_server)
    assert "the trainer's log-odds are 2.0" in found(audited(run), "weights", "differ").fix
    late = "later weights do not reach the server"

    def shift_late(groups: list[Group]) -> None:
        rewrite_all = [group for group in groups if group.version > 0]
        shift_logprobs(rewrite_all)

    shutil.rmtree(stage)
    shutil.copytree(run.with_name("kept"), stage, symlinks=True)
    rewrite(stage, shift_late)
    assert late in found(audited(run), "weights", "differ").fix


def test_advantages_are_compared_with_rewards(run: Path, stage: Path) -> None:
    def turn(lines: list[dict[str, Any]]) -> None:
        for row in (row for line in lines for rows in line["chains"].values() for row in rows):
            row["advantage"] = [-value for value in row["advantage"]]

    def move(lines: list[dict[str, Any]]) -> None:
        for row in (row for line in lines for rows in line["chains"].values() for row in rows):
            row["advantage"] = [0.1 - value for value in row["advantage"]]

    credit = stage / "trajectories" / "credit.jsonl"
    rewrite_lines(credit, turn)
    assert found(audited(run), "groups", "a higher reward has a lower advantage").evidence
    rewrite_lines(credit, move)
    assert found(audited(run), "groups", "advantages are not those of the group's rewards").evidence


def targets_of_results(row: dict[str, Any]) -> None:
    first = row["targets"][0]
    row |= {"targets": [first - 1, *row["targets"]], "advantage": [0.0, *row["advantage"]]}
    row["proximal"] = [0.0, *row["proximal"]]


def half_of_the_targets(row: dict[str, Any]) -> None:
    row |= {name: row[name][: len(row[name]) // 2] for name in ("targets", "advantage", "proximal")}


def advantage_at_once(row: dict[str, Any]) -> None:
    row["advantage"] = [sum(row["advantage"]), *[0.0] * (len(row["advantage"]) - 1)]


@pytest.mark.parametrize(
    ("change", "topic", "words"),
    [
        (targets_of_results, "trained tokens", "tokens were trained that the policy did not sample"),
        (half_of_the_targets, "trained tokens", "sampled tokens were not trained"),
        (advantage_at_once, "groups", "different advantages from token to token"),
    ],
)
def test_what_was_trained_is_compared_with_what_was_sampled(
    run: Path, stage: Path, change: Callable[[dict[str, Any]], None], topic: str, words: str
) -> None:
    def each(lines: list[dict[str, Any]]) -> None:
        for row in (row for line in lines for rows in line["chains"].values() for row in rows):
            change(row)

    rewrite_lines(stage / "trajectories" / "credit.jsonl", each)
    assert found(audited(run), topic, words).severity is Severity.WRONG


def test_a_chain_or_a_group_that_is_missing_is_told(run: Path, stage: Path) -> None:
    rewrite_lines(
        stage / "trajectories" / "credit.jsonl", lambda lines: [line["chains"].popitem() for line in lines][:0]
    )
    assert found(audited(run), "trained tokens", "chains that count were not trained").evidence
    (stage / "trajectories" / "train.jsonl").write_text("")
    assert found(audited(run), "trained tokens", "are not among the trajectories").severity is Severity.WRONG


def test_results_of_evaluations_are_compared_with_their_chains(run: Path, stage: Path) -> None:
    file = sorted((stage / "trajectories" / "eval").glob("*-sampled.jsonl"))[-1]
    rewrite(stage, lambda groups: groups[:2], f"eval/{file.name}")
    summary = json.loads((stage / "summary.json").read_text())
    (stage / "summary.json").write_text(json.dumps({**summary, "steps": 99}))
    report = audited(run)
    assert found(report, "metrics", "figures of held-out tasks are not those of their chains").evidence
    assert found(report, "metrics", "summary.json has 99 steps, and metrics.jsonl ends with step ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '[1]\n{"step": "x", "reward": 1}\n{"step": 1, "grad_norm": "x"}\n'),
        ("summary.json", '{"status": 3, "success_before": "x", "success_after": [], "reason": 4}'),
        ("trajectories/credit.jsonl", '{"group":"g000000","step":1}\n{"group":"g000001","step":1,"chains":[]}\n'),
        ("trajectories/train.jsonl", '{"id": "g000000", "task": {}, "trajectories": [{"messages": [{}]}]}\n'),
    ],
)
def test_damaged_files_are_findings(run: Path, stage: Path, name: str, text: str) -> None:
    (stage / name).write_text(text)
    assert audited(run).worst is Severity.WRONG


def test_metrics_are_compared_with_themselves(run: Path, stage: Path) -> None:
    def spoil(lines: list[dict[str, Any]]) -> None:
        last = [line for line in lines if "grad_norm" in line][-1]
        last |= {"loss": float("nan"), "step": last["step"] + 5}

    rewrite_lines(stage / "metrics.jsonl", spoil)
    report = audited(run)
    assert found(report, "metrics", "loss is not a number in 1 steps, first in step ")
    assert found(report, "metrics", "follows step")


def test_held_out_tasks_that_are_trained_on_are_found(run: Path, stage: Path) -> None:
    file = next((stage / "trajectories" / "eval").glob("*-sampled.jsonl"))
    training = next(read_groups(stage / "trajectories" / "train.jsonl"))
    rewrite(stage, lambda groups: setattr(groups[0], "task", training.task), f"eval/{file.name}")
    finding = found(audited(run), "tasks", "also training tasks")
    assert finding.severity is Severity.WRONG
    assert finding.evidence[0].file == f"trajectories/eval/{file.name}"


def test_a_damaged_file_is_told_and_a_last_line_in_writing_is_not(run: Path, stage: Path) -> None:
    file = stage / "trajectories" / "train.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-100])
    assert found(audited(run), "its files", "train.jsonl cannot be read")
    summary = stage / "summary.json"
    kept = summary.read_text()
    summary.unlink()
    assert not [finding for finding in audited(run).findings if finding.severity is Severity.WRONG]
    summary.write_text(kept)
    lines = whole.splitlines(keepends=True)
    file.write_text("".join([lines[0], "{}\n", *lines[1:]]))
    assert "train.jsonl:2 is not a saved group" in found(audited(run), "its files", "cannot be read").evidence[0].text


def test_a_run_that_stopped_says_why(run: Path, stage: Path) -> None:
    (stage / "summary.json").unlink()
    log = stage / "logs" / "train.log"
    text = log.read_text()
    log.write_text(f"{text}SyncError: version 4: the server's checksum is another; fix: look at its log\n")
    finding = found(audited(run), "the end of the run", "the run stopped after step")
    assert (finding.severity, finding.fix) == (Severity.WRONG, "look at its log")
    log.write_text("\n".join(line for line in text.splitlines() if " ERROR " not in line))
    assert found(audited(run), "the end of the run", "without a word").severity is Severity.WARNING


def test_the_command_prints_text_json_and_a_page(
    run: Path, stage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run), "--json", "--html", str(tmp_path / "page.html")]) == 0
    sft, grpo = map(json.loads, capsys.readouterr().out.splitlines())
    assert (sft["run"], grpo["run"], grpo["worst"]) == ("run/sft", "run/grpo", None)
    assert grpo["conclusion"].count(". ") == 2
    assert "Nothing that was checked is wrong" in (tmp_path / "page.html").read_text()
    rewrite(stage, lambda groups: groups[0].trajectories[0].messages.__setitem__(0, {"role": "user", "content": "<b>"}))
    rewrite(stage, reward_failures)
    assert main(["audit", str(run), "--html", str(tmp_path / "page.html")]) == 1
    text = capsys.readouterr().out
    assert "wrong: rewards: 1 chains that failed have a reward" in text
    assert "fix: give failed chains no reward" in text
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "<b>" not in page


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path / "nothing")]) == 2
    assert "RUN: there is no " in capsys.readouterr().err
    assert main(["audit", str(tmp_path)]) == 2
    assert "is no run; fix: name a folder that `agentfactory train` has written" in capsys.readouterr().err


def test_rows_are_counted_as_the_viewer_counts_them() -> None:
    assert Evidence("masked", chain="g0.1", row=1, position=5).place == "chain g0.1, row 2, token 5"
    assert Evidence("masked", chain="g0.1", row=0, position=5).place == "chain g0.1, token 5"

"""`agentfactory audit`: nothing in a healthy run, and each planted fault by its topic and place."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentfactory.audit.audit import audit
from agentfactory.audit.checks.ending import EndingCheck
from agentfactory.audit.reports import Report
from agentfactory.audit.run_record import records_of
from agentfactory.base.findings import Finding, Severity
from agentfactory.commands.main import main
from agentfactory.rollout.groups.group_files import append_group, delete_groups, read_groups
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory

CHECKED = {
    *("the end of the run", "weights", "tokens and masks", "trained tokens", "rewards", "chains played again"),
    *("metrics", "tasks", "chains lost", "groups", "tool calls", "format", "exploits", "lengths", "greedy chains"),
}


@pytest.fixture(scope="module")
def run(quickstart_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def exchange_tasks(groups: list[Group]) -> None:
    groups[0].task, groups[1].task = groups[1].task, groups[0].task


def heat_the_server(groups: list[Group]) -> None:
    """The server's log-odds are half of the trainer's, as those of two tokens at the temperature 2."""
    for chain in chains_of(groups):
        row = chain.rows[0]
        certain = np.minimum(row.logprobs, -1e-6)
        odds = (certain - np.log1p(-np.exp(certain))) / 2
        row.logprobs = np.where(row.mask, -np.log1p(np.exp(-odds)), 0.0)


def name_other_weights(groups: list[Group]) -> None:
    for chain in chains_of(groups):
        chain.rows[0].versions[0].version = "another-run-v0"


def lose_chains(groups: list[Group]) -> None:
    for chain in chains_of(groups):
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
    (1, train_context, "tokens and masks", "masks differ", ", token 0"),
    (1, change_ids, "tokens and masks", "token ids differ", ", token 3"),
    (1, edit_messages, "tokens and masks", "read as another message", "token"),
    (1, change_rewards, "chains played again", "have another reward", "chain"),
    (1, reward_failures, "rewards", "1 chains that failed have a reward", "chain"),
    (1, repeat_a_group, "tasks", "1 groups were saved twice", "group g"),
    (2, exchange_tasks, "tasks", "2 groups have another task", "group g"),
    (1, name_other_weights, "weights", "by weights that this run did not publish", "token"),
    (1, lose_chains, "chains lost", "ended as timeout", "chain"),
    (1, lose_a_task, "tasks", "all groups of 1 of ", ""),
    (1, leave_calls_unanswered, "tool calls", "have no answer", "chain"),
]
"""The number of groups with the fault, the fault, and the topic, the words and the place of its finding."""


def found(report: Report, topic: str, words: str) -> Finding:
    of_topic = [finding for finding in report.findings if finding.topic == topic]
    matching = [finding for finding in of_topic if words in finding.text]
    assert matching, (topic, words, [(finding.topic, finding.text) for finding in report.findings])
    return matching[0]


def test_each_fault_of_a_group_is_found_with_its_place(run: Path, stage: Path) -> None:
    def plant(groups: list[Group]) -> list[Group]:
        groups.sort(key=lambda group: group.id)
        changed, rest = groups[:1], iter(groups[2:])
        for size, fault, *_ in PLANTED:
            with_fault = list(islice(rest, size))
            changed += fault(with_fault) or with_fault
        return [*changed, *rest]

    rewrite(stage, plant)
    report = audited(run)
    for _, fault, topic, words, place in PLANTED:
        finding = found(report, topic, words)
        assert finding.severity is not Severity.NOTE, fault
        assert finding.fix, fault
        assert place in finding.evidence[0].place, fault
    assert found(report, "tasks", "1 places of ").evidence[0].place == "group g000001"
    assert found(report, "metrics", "report another reward").evidence[0].file == "metrics.jsonl"


def test_rewards_of_tokens_are_the_same_when_played_again(run: Path, stage: Path) -> None:
    recipe = stage / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("rewards: []", "rewards: [{reward: length, options: {longest: 1}}]"))
    rewrite(stage, lambda groups: [setattr(chain, "reward", -1.0) for chain in chains_of(groups)] and None)
    again = [one for one in audited(run).findings if one.topic == "chains played again"]
    assert [place for one in again for place in one.evidence if "/eval/" not in place.file] == []


def test_calls_that_are_text_of_the_messages_are_calls(run: Path, stage: Path) -> None:
    def plant(groups: list[Group]) -> None:
        for chain in chains_of(groups):
            chain.messages = [{**message, "tool_calls": []} for message in chain.messages]

    rewrite(stage, plant)
    assert not [finding for finding in audited(run).findings if "called a tool" in finding.text]


def test_faults_of_all_chains_are_told_with_their_cause(run: Path, stage: Path) -> None:
    def plant(groups: list[Group]) -> None:
        edit_results(groups)
        heat_the_server(groups)

    rewrite(stage, plant)
    report = audited(run)
    assert "token" in found(report, "tokens and masks", "token ids differ").evidence[0].place
    assert found(report, "chains played again", "do something else").severity is Severity.WARNING
    assert "the trainer's log-odds are 2.0" in found(report, "weights", "server and trainer differ").fix


def test_weights_that_did_not_arrive_are_told(run: Path, stage: Path) -> None:
    def shift_late(groups: list[Group]) -> None:
        for chain in chains_of([group for group in groups if group.version > 0]):
            chain.rows[0].logprobs = chain.rows[0].logprobs - 0.3 * chain.rows[0].mask

    rewrite(stage, shift_late)
    assert "later weights do not reach the server" in found(audited(run), "weights", "differ").fix


def test_chains_that_are_all_the_same_are_told(run: Path, stage: Path) -> None:
    def sample_the_same(groups: list[Group]) -> None:
        for group in groups:
            first = group.trajectories[0]
            for chain in group.trajectories:
                chain.rows, chain.messages = first.rows, first.messages
                chain.turns, chain.anchors = first.turns, first.anchors

    rewrite(stage, sample_the_same)
    assert found(audited(run), "groups", "all chains are the same").evidence[0].chain


def test_what_was_trained_is_compared_with_what_was_sampled(run: Path, stage: Path) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        context, half, missing = lines[:3]
        for row in (row for rows in context["chains"].values() for row in rows):
            first = row["targets"][0]
            row |= {"targets": [first - 1, *row["targets"]], "advantage": [0.0, *row["advantage"]]}
            row["proximal"] = [0.0, *row["proximal"]]
        for row in (row for rows in half["chains"].values() for row in rows):
            row |= {name: row[name][: len(row[name]) // 2] for name in ("targets", "advantage", "proximal")}
        missing["chains"].popitem()

    rewrite_lines(stage / "trajectories" / "credit.jsonl", change)
    rewrite(stage, lambda groups: groups[:-1])
    report = audited(run)
    for words in (
        "1 groups that 1 steps trained are not among the trajectories",
        "tokens were trained that the policy did not sample",
        "sampled tokens were not trained",
        "1 chains that count were not trained",
    ):
        assert found(report, "trained tokens", words).severity is Severity.WRONG


def test_figures_are_compared_with_their_chains_and_with_themselves(run: Path, stage: Path) -> None:
    first, *_, last = sorted((stage / "trajectories" / "eval").glob("*-sampled.jsonl"))
    training = next(read_groups(stage / "trajectories" / "train.jsonl"))
    rewrite(stage, lambda groups: setattr(groups[0], "task", training.task), f"eval/{first.name}")
    rewrite(stage, lambda groups: groups[:2], f"eval/{last.name}")
    summary = json.loads((stage / "summary.json").read_text())
    (stage / "summary.json").write_text(json.dumps({**summary, "steps": 99}))

    def spoil(lines: list[dict[str, Any]]) -> None:
        step = [line for line in lines if "grad_norm" in line][-1]
        step |= {"loss": float("nan"), "step": step["step"] + 5}

    rewrite_lines(stage / "metrics.jsonl", spoil)
    report = audited(run)
    for words in (
        "figures of held-out tasks are not those of their chains",
        "summary.json has 99 steps, and metrics.jsonl ends with step ",
        "loss is not a number in 1 steps, first in step ",
        "follows step",
    ):
        assert found(report, "metrics", words).severity is Severity.WRONG
    shared = found(report, "tasks", "also training tasks")
    assert (shared.severity, shared.evidence[0].file) == (Severity.WRONG, f"trajectories/eval/{first.name}")


def problems(run: Path) -> dict[str, str]:
    """Read all files of the run; return the file and the text of what is wrong with them."""
    (record,) = [record for record in records_of(run) if record.name.endswith("grpo")]
    assert list(record.groups()) or record.problems
    return {finding.evidence[0].file: finding.evidence[0].text for finding in record.problems}


def test_damaged_files_are_told(run: Path, stage: Path) -> None:
    damaged = {
        "metrics.jsonl": '[1]\n{"step": "x", "reward": 1}\n{"step": 1, "grad_norm": "x"}\n',
        "summary.json": '{"status": 3, "success_before": "x", "success_after": [], "reason": 4}',
        "credit.jsonl": '{"group":"g000000","step":1}\n{"group":"g000001","step":1,"chains":[]}\n',
        "train.jsonl": '{"id": "g000000", "task": {}, "trajectories": [{"messages": [{}]}]}\n',
    }
    for name, text in damaged.items():
        next(stage.rglob(name)).write_text(text)
    assert {Path(name).name for name in problems(run)} == {*damaged}
    assert {finding.severity for finding in audited(run).findings if finding.topic == "its files"} == {Severity.WRONG}


def test_a_last_line_in_writing_is_no_damage(run: Path, stage: Path) -> None:
    file = stage / "trajectories" / "train.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-100])
    assert list(problems(run)) == ["trajectories/train.jsonl"]
    (stage / "summary.json").unlink()
    assert problems(run) == {}
    lines = whole.splitlines(keepends=True)
    file.write_text("".join([lines[0], "{}\n", *lines[1:]]))
    assert "train.jsonl:2 is not a saved group" in problems(run)["trajectories/train.jsonl"]


def test_a_run_that_stopped_says_why(run: Path, stage: Path) -> None:
    def ending() -> Finding:
        (record,) = [record for record in records_of(run) if record.name.endswith("grpo")]
        (finding,) = EndingCheck(record, {}).findings()
        return finding

    (stage / "summary.json").unlink()
    log = stage / "logs" / "train.log"
    text = log.read_text()
    log.write_text(f"{text}SyncError: version 4: the server's checksum is another; fix: look at its log\n")
    finding = ending()
    assert finding.text.startswith("the run stopped after step")
    assert (finding.severity, finding.fix) == (Severity.WRONG, "look at its log")
    log.write_text("\n".join(line for line in text.splitlines() if " ERROR " not in line))
    finding = ending()
    assert (finding.severity, finding.text.endswith("without a word: it was killed")) == (Severity.WARNING, True)


def test_text_json_and_a_page(run: Path, stage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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

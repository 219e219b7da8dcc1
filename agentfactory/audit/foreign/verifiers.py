"""Evaluations of verifiers: the folder of a `vf-eval`.

From 0.3.1 on it holds traces.jsonl, with an episode a line, and configs/resolved/eval.json; tried with 0.4.0. Up to 0.3
`vf-eval --save-results` writes results.jsonl and metadata.json; tried with 0.1.14.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentfactory.audit import record as streams
from agentfactory.audit.foreign.files import first_row, object_of
from agentfactory.audit.foreign.gather import Gathered, Item, Saved, saved_lines, short_name
from agentfactory.audit.foreign.results import chain_of as chain_of_result
from agentfactory.audit.foreign.results import is_result, result_of, task_of
from agentfactory.audit.foreign.traces import Task, Trace, chain_of, episode_of, failed, is_trace, policies
from agentfactory.audit.record import Record

KIND = "verifiers"
_TRACES, _RESULTS, _METADATA = "traces.jsonl", "results.jsonl", "metadata.json"
_CONFIG = Path("configs", "resolved", "eval.json")
_LACKS = {
    streams.TRAINED: "an evaluation trains nothing",
    streams.HELD_OUT: "it is an evaluation, without training beside it",
    streams.METRICS: "an evaluation has no steps",
    streams.ORDER: "verifiers saves chains in the order in which they end",
    streams.MALFORMED: "verifiers does not save which calls could not be read",
    streams.RECIPE: "verifiers saves no recipe of ours",
}


def read(path: Path) -> Record | None:
    """Return the record of the evaluation in a folder, or a file of it. Raises SettingError if a line is damaged."""
    file = (
        path if path.is_file() else next((path / name for name in (_TRACES, _RESULTS) if (path / name).is_file()), None)
    )
    if file is None or file.name not in (_TRACES, _RESULTS) or not _is_evaluation(file):
        return None
    gathered = Gathered(file.parent, lambda: saved_lines([file]), items)
    record = Record(file.parent.resolve().name, KIND, file.parent, gathered.groups, gathered.size)
    record.summary = _summary(file.parent)
    record.lacks = {**_LACKS, **lacks_of(gathered)}
    record.problems = gathered.problems()
    return record


def lacks_of(gathered: Gathered) -> dict[str, str]:
    """Return the streams that none of these chains has."""
    lacks = {}
    if not gathered.tokens:
        lacks[streams.TOKENS] = "these chains have no token ids: they came from a chat endpoint, or of an older version"
    if not gathered.logprobs:
        lacks[streams.LOGPROBS] = "these chains have no log-probabilities"
    return lacks


def _is_evaluation(file: Path) -> bool:
    if (file.parent / _METADATA).is_file() or (file.parent / _CONFIG).is_file():
        return True
    row = first_row(file)
    return is_trace(row) or is_result(row)


def _summary(folder: Path) -> dict[str, Any]:
    return next((object_of(folder / name) for name in (_METADATA, _CONFIG) if (folder / name).is_file()), {})


def items(saved: Saved) -> Iterator[Item]:
    """Yield the chains of a line of an evaluation. Chains of a task are a group."""
    row: dict[str, Any] = saved.content
    if not is_trace(row):
        result = result_of(row)
        group = f"task-{result.example_id}"
        chain = chain_of_result(result, f"{group}:line-{saved.number}")
        yield Item(group, chain, task_of(result), "sampled", source=result.env_id or "")
        return
    episode = episode_of(row)
    name = name_of(episode.task)
    for trace in policies(episode):
        yield Item(group_of(name, trace), chain_of(trace), trace.task.data, "sampled")
    if not episode.traces:
        yield Item(name, failed(episode), episode.task.data, "sampled")


def name_of(task: Task) -> str:
    """Return the name of a task: its number in the data, or what identifies it."""
    number = task.data.get("idx")
    name = task.key or task.hash or ""
    return f"task-{number}" if isinstance(number, int) else short_name(name) if name else "task"


def group_of(name: str, trace: Trace) -> str:
    """Return the id of a trace's group: agents with other names are in groups of their own."""
    return name if trace.agent.name == "agent" else f"{name}:{trace.agent.name}"

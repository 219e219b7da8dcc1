"""Runs of prime-rl: the folder of a run, with the chains that its orchestrator saves.

Read from the source of prime-rl at four stages; the files of the tests are written as it does, with the classes of
verifiers 0.4.0 for episodes, by no run of prime-rl:

- rollouts/step_N/{train,eval}_rollouts.jsonl: rows of verifiers 0.1 (orchestrator.py, utils/vf.py: `save_rollouts`),
  or a trace a line;
- rollouts/step_N/{train,eval}/{all,effective}/traces.jsonl (0.9.1.dev28): an episode or a trace a line; `effective`
  repeats those that were trained;
- traces/step_N/{train,eval}/traces.jsonl with annotations/PRODUCER.jsonl (monitors/file.py: `log_episodes`);
- traces/stream/NNNNN.jsonl, or .jsonl.zst, with annotations/PRODUCER/NNNNN.jsonl, also below monitors/file
  (monitors/file/monitor.py, traces/chunks.py, traces/update.py, orchestrator/annotations.py, from 0.9.1.dev29 on).

All may be below run_default. Rollouts in train_rollouts.bin are those of the trainer, in a form that changes with each
version, and are not read.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentfactory.audit import record as streams
from agentfactory.audit.foreign import results, traces
from agentfactory.audit.foreign.files import malformed, metric_lines, numbers_of, rows_of
from agentfactory.audit.foreign.gather import Gathered, Item, Saved, short_name
from agentfactory.audit.foreign.verifiers import group_of, lacks_of, name_of
from agentfactory.audit.record import Record

KIND = "prime-rl"
_PLACES = (".", "run_default", "monitors/file", "run_default/monitors/file")
_FILES = (
    *("rollouts/step_*/*_rollouts.jsonl", "rollouts/step_*/*/effective/traces.jsonl*"),
    *("rollouts/step_*/*/all/traces.jsonl*", "traces/step_*/*/traces.jsonl", "traces/stream/*.jsonl*"),
)
"""Files of chains. Those that were trained come before all, because only they have advantages."""
_NOTES = ("traces/step_*/*/annotations/*.jsonl", "traces/annotations/*/*.jsonl*")
_OURS = {
    "optim/grad_norm": "grad_norm",
    "loss/mean": "loss",
    "optim/lr": "learning_rate",
    "entropy/all/mean": "entropy",
    "entropy/mean": "entropy",
    "reward/all/mean": "reward",
    "train/agg/effective/agent/reward/mean": "reward",
}
"""Name of a metric of prime-rl -> the name that it has here, beside its own."""


def read(path: Path) -> Record | None:
    """Return the record of the run in the folder `path`. Raises SettingError if a line is damaged."""
    found = [(path / place, files) for place in _PLACES if (files := _files(path / place, _FILES))]
    if not found:
        return None
    folder, files = found[0]
    run = _Run(path, files, _files(folder, _NOTES))
    record = Record(path.resolve().name, KIND, path, run.gathered.groups, run.gathered.size)
    record.labels = {traces.Version(step, step).label: step for step in run.versions}
    record.metrics = _metrics([folder, path, path / "run_default"])
    lacks = lacks_of(run.gathered)
    lacks[streams.ORDER] = "prime-rl does not save the order of the tasks"
    lacks[streams.MALFORMED] = "prime-rl does not save which calls could not be read"
    lacks[streams.RECIPE] = "prime-rl saves no recipe of ours"
    if not run.gathered.held_out:
        lacks[streams.HELD_OUT] = "there are no evaluations beside training"
    if not run.gathered.credit:
        lacks[streams.TRAINED] = "these files have no advantages of tokens: prime-rl saves them from 0.9.1 on"
    if not record.metrics:
        lacks[streams.METRICS] = "there is no metrics.jsonl: prime-rl writes it with a file monitor"
    record.lacks = lacks
    record.problems = run.gathered.problems()
    return record


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return the files with names like these, by step, and for each step in the order of `patterns`."""
    found = [
        (_step(file) or 0, rank, str(file), file)
        for rank, pattern in enumerate(patterns)
        for file in folder.glob(pattern)
        if file.name.endswith((".jsonl", ".jsonl.zst")) and ".index." not in file.name
    ]
    found.sort(key=lambda entry: entry[:3])
    # a chunk that is just being compressed lies there in both forms
    plain = {entry[3] for entry in found}
    return [file for *_, file in found if file.suffix != ".zst" or file.with_suffix("") not in plain]


def _step(file: Path) -> int | None:
    found = re.search(r"/step_(\d+)/", file.as_posix())
    return int(found[1]) if found else None


def _metrics(folders: list[Path]) -> list[dict[str, float]]:
    file = next((folder / "metrics.jsonl" for folder in folders if (folder / "metrics.jsonl").is_file()), None)
    return [] if file is None else metric_lines((numbers_of(row) for _, row in rows_of(file)), _OURS)


class _Run:
    def __init__(self, folder: Path, files: list[Path], notes: list[Path]) -> None:
        self._files = files
        self._notes: dict[str, list[traces.Update]] = defaultdict(list)
        # the trainer's notes last, because the orchestrator ships what the trainer then trains
        for file in sorted(notes, key=lambda file: "trainer" in (file.stem, file.parent.name)):
            self._note(file)
        self.versions: set[int] = set()
        self.gathered = Gathered(folder, self._saved, self._items)

    def _note(self, file: Path) -> None:
        for number, row in rows_of(file):
            try:
                name, update = traces.update_of(row)
            except ValueError as error:
                raise malformed(file, number, error) from error
            self._notes[name].append(update)

    def _saved(self) -> Iterator[Saved]:
        trained: set[str] = set()
        for file in self._files:
            for number, row in rows_of(file):
                name = row.get("id")
                if isinstance(name, str) and traces.is_trace(row):
                    if name in trained:
                        continue  # of `all`, and in `effective` before
                    if "effective" in file.parts:
                        trained.add(name)
                yield Saved(file, number, row)

    def _items(self, saved: Saved) -> Iterator[Item]:
        row: dict[str, Any] = saved.content
        if not traces.is_trace(row):
            yield self._result(saved)
            return
        episode = traces.episode_of(row)
        for trace in traces.policies(episode):
            yield self._item(saved, episode, trace)
        if not episode.traces:
            held_out = _is_held_out(saved.file, episode.work, {})
            step = _dispatched(saved.file, episode.work, {}) if held_out else None
            group = _group(episode, None, step)
            yield Item(group, traces.failed(episode), episode.task.data, "sampled" if held_out else "", step)

    def _result(self, saved: Saved) -> Item:
        """Return the chain of a row of verifiers 0.1. All rows of train_rollouts.jsonl were trained in its step."""
        result = results.result_of(saved.content)
        step = _step(saved.file)
        held_out = saved.file.name.startswith("eval")
        source = result.env_id or (result.task if isinstance(result.task, str) else "")
        group = f"step-{step}:{source + ':' if source else ''}{result.example_id}"
        chain = results.chain_of(result, f"{group}:line-{saved.number}")
        return Item(group, chain, results.task_of(result), "sampled" if held_out else "", step, source=source)

    def _item(self, saved: Saved, episode: traces.Episode, trace: traces.Trace) -> Item:
        for update in self._notes.get(trace.id, ()):
            traces.fold(trace, update)
        work, info = episode.work, trace.info
        version = _version(work, info)
        if version is not None:
            self.versions.update((version.first, version.last))
        held_out = _is_held_out(saved.file, work, info)
        step = _dispatched(saved.file, work, info) if held_out else _trained(saved.file, info)
        return Item(
            _group(episode, trace, step if held_out else None),
            traces.chain_of(trace, version),
            trace.task.data,
            "sampled" if held_out else "",
            step,
            () if held_out else list(traces.credit_of(trace)),
            version.first if version is not None else 0,
            str(episode.env.get("name") or info.get("env_name") or ""),
        )


def _group(episode: traces.Episode, trace: traces.Trace | None, evaluated: int | None) -> str:
    info = trace.info if trace is not None else {}
    named = (episode.group or {}).get("id") or info.get("group_id")
    group = short_name(str(named)) if named is not None else name_of(episode.task)
    group = group if evaluated is None else f"step-{evaluated}:{group}"
    return group if trace is None else group_of(group, trace)


def _is_held_out(file: Path, work: Mapping[str, Any], info: Mapping[str, Any]) -> bool:
    if kind := work.get("type") or info.get("kind"):
        return bool(kind == "eval")
    return "eval" in file.parts or file.name.startswith("eval")


def _dispatched(file: Path, work: Mapping[str, Any], info: Mapping[str, Any]) -> int | None:
    """Return the step before which an evaluation was."""
    step = work.get("step", info.get("eval_step"))
    return step if isinstance(step, int) else _step(file)


def _trained(file: Path, info: Mapping[str, Any]) -> int | None:
    """Return the step that trained a trace; None if it was not, or is not yet."""
    noted = (info.get("ship") or {}).get("step"), (info.get("train") or {}).get("trained_at_step")
    for step in noted:
        if isinstance(step, int):
            return step
    is_trained = "effective" in file.parts or file.name.startswith("train_rollouts")
    return _step(file) if is_trained else None


def _version(work: Mapping[str, Any], info: Mapping[str, Any]) -> traces.Version | None:
    """Return the weights that sampled a trace, if they are known."""
    policy = work.get("policy")
    if isinstance(policy, dict) and isinstance(policy.get("start"), int):
        end = policy.get("end")
        return traces.Version(policy["start"], end if isinstance(end, int) else policy["start"])
    noted = info.get("policy_version")
    return traces.Version(noted, noted) if isinstance(noted, int) else None

"""The charts for the names in metrics.jsonl, in sections, each with its unit and meaning."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from agentfactory.trainers.metrics import METRICS, Metric

CHAIN_METRICS = [
    Metric("success", "", "1 if the task was solved, according to the reward or the environment, otherwise 0"),
    Metric("reward/<reward>", "", "value of one reward of the recipe, before its weight is applied"),
    Metric("tool_calls", "calls", "calls by the chain, including refused ones and those of an agent's own tools"),
    Metric("tool/<tool>/calls", "calls", "calls of this tool"),
    Metric("tool/<tool>/errors", "calls", "calls of this tool that returned an error"),
    Metric("tool/<tool>/seconds", "s", "total time of the calls of this tool"),
    Metric("tool_errors/malformed_call", "turns", "turns that looked like a call but could not be parsed"),
    Metric("tool_errors/unknown_tool", "calls", "calls of a tool that does not exist"),
    Metric("tool_errors/invalid_arguments", "calls", "calls whose arguments do not fit the tool's schema"),
    Metric("tool_errors/tool_error", "calls", "calls for which the tool itself returned an error"),
    Metric("tool_errors/tool_timeout", "calls", "calls that exceeded their time limit"),
    Metric("tool_errors/tool_limit", "calls", "calls that a limit refused or truncated"),
    Metric("tool_seconds", "s", "time during which at least one call was running"),
    Metric("tool_wait_seconds", "s", "total time that calls waited for limits.calls_per_second"),
    Metric("tool_cost", "", "total cost of the calls, by limits.cost_per_call"),
    Metric("held_seconds", "s", "time that turns waited for room in the servers' caches (rollout.concurrency: auto)"),
    Metric("truncated_turns", "turns", "turns that were truncated at rollout.max_tokens"),
    Metric("sampled_tokens", "tokens", "tokens that the model sampled"),
    Metric("rows", "rows", "token rows of the chain: more than one if its history was rewritten or shortened"),
    Metric("row_tokens", "tokens", "tokens of all rows of the chain, context included"),
    Metric("teacher_tokens", "tokens", "tokens that the server at teacher.url computed: whole rows, without its cache"),
    Metric("teacher_seconds", "s", "time from the chain's end to the last grade of that server"),
    Metric("gateway/spliced_turns", "turns", "turns that an agent sent back in a different history than sampled"),
    Metric("gateway/unmatched_turns", "turns", "assistant messages of an agent that were not sampled"),
    Metric("gateway/unmet_parameters", "", "parameters of an agent's requests that were not applied"),
    Metric("penalty", "", "amount that rollout.outcome_penalty subtracted from the reward"),
    Metric("limits/<limit>", "", "how often this limit was reached"),
    Metric("stop/<reason>", "", "1 if this reason ended the chain, otherwise 0"),
    Metric("user/turns", "messages", "messages of the simulated user (rollout.user)"),
    Metric("user/calls", "calls", "tool calls of the simulated user"),
    Metric("user/seconds", "s", "time in which the simulated user wrote its messages"),
    Metric("user/tokens", "tokens", "tokens that the simulated user's model read and wrote"),
    Metric("user/cost", "", "cost of these tokens, by the option prices"),
    Metric("user/<name>", "", "a number that the script of the simulated user counted"),
    Metric("failed", "", "share of the chains that failed"),
]
"""The `metrics` of a trajectory, `trajectory/<name>` in metrics.jsonl."""

EVAL_METRICS = [
    Metric("avg@<k>", "", "success of the k chains of a task, mean over tasks"),
    Metric("pass@<k>", "", "chance that at least one of k chains passes, unbiased (arXiv:2107.03374), mean over tasks"),
    Metric("<figure>/low", "", "lower end of the metric's 95 % interval over tasks (`agentfactory eval`)"),
    Metric("<figure>/high", "", "upper end of the same interval"),
    Metric("source/<source>/<figure>", "", "the metric over the tasks with this value in their field `source`"),
]
"""Metrics that an evaluation adds to those of chains, under `eval/sampled/` and `eval/greedy/`."""

_OWN = "Task metrics"
_SECTIONS = {
    "Reward": ["reward", "success", "reward_std", "trajectory/reward/.*"],
    "Sources": [*(f"source/[^/]+/{name}" for name in ("success", "reward", "turns", "groups")), "sources/.*"],
    _OWN: [],
    "Lengths and turns": [
        *("turns", "trajectory/sampled_tokens", "tokens", "trajectory/truncated_turns", "trajectory/rows"),
        "trajectory/row_tokens",
    ],
    "Tools": [
        *("trajectory/tool_calls", "unknown-tool rate", "latency of .*", "error rate of .*"),
        *("trajectory/tool/.*/calls", "trajectory/tool/.*/errors", "trajectory/tool_errors/.*"),
        *("trajectory/tool_cost", "trajectory/tool_wait_seconds", "trajectory/limits/.*"),
    ],
    "Outcomes": [
        *("outcome/.*", "trajectory/failed", "trajectory/stop/.*", "trajectory/penalty"),
        *("groups/.*", "filtered/.*", "cancelled/.*", "started/.*"),
    ],
    "Environments and curriculum": ["environments/.*", "curriculum/.*"],
    "Policy": ["loss", "kl", "entropy", "grad_norm", "clip_fraction", "learning_rate", "critic/.*"],
    "Trainer against server": ["staleness/.*", "mismatch/.*", "mixed_tokens", "sync/.*"],
    "Servers' prefix caches": ["prefix/.*", "trajectory/held_seconds"],
    "Speed": [
        *("tokens_per_second", "seconds/step", "seconds/.*", "trajectory/tool_seconds", "trajectory/tool/.*/seconds")
    ],
}

_HELD_OUT = re.compile(r"eval/(sampled|greedy)/(.+)")
_OF_A_SOURCE = re.compile(r"(source/[^/]+/)(.+)")
_END = re.compile(r"(.+)/(low|high)")
_CALLS = re.compile(r"trajectory/tool/(.+)/calls")


def charts(names: Iterable[str]) -> dict[str, Any]:
    """Return `sections`, each with a title and charts, and `others`, the charts without a section. A chart has a key, a
    title, a unit, a meaning, and lines; a line the metric, its kind (`train`, `sampled` and `greedy` on held-out tasks,
    `rollout`), and optionally `per`, the metric that it is divided by, or `low` and `high`, its interval's metrics."""
    by_key: dict[str, dict[str, str]] = defaultdict(dict)
    measured = list(names)
    ends = _interval_ends(measured)
    bounds = {end for pair in ends.values() for end in pair.values()}
    for name in measured:
        if name in bounds:
            continue
        key, kind = _place(name)
        by_key[key][kind] = name
    by_key.pop("step", None)
    found = {
        key: _chart(key, [{"kind": kind, "name": name, **ends.get(name, {})} for kind, name in lines.items()])
        for key, lines in by_key.items()
    }
    found |= _ratios(by_key)
    sections = []
    for title, patterns in _SECTIONS.items():
        matching = [key for pattern in patterns for key in found if re.fullmatch(pattern, key)]
        chosen = _own(found) if title == _OWN else dict.fromkeys(matching)
        if chosen:
            sections.append({"title": title, "charts": [found.pop(key) for key in chosen]})
    return {"sections": sections, "others": [found[key] for key in sorted(found)]}


def meaning_of(key: str) -> Metric | None:
    """Return the entry of a key in our tables of metrics."""
    if key.startswith("trajectory/"):
        return _look_up(key.removeprefix("trajectory/"), [*CHAIN_METRICS, *EVAL_METRICS])
    return _look_up(key, METRICS)


def _place(name: str) -> tuple[str, str]:
    """Return the key of a metric's chart, and the kind of its line."""
    if match := _HELD_OUT.fullmatch(name):
        return _chain_key(match[2]), match[1]
    if name.startswith("rollout/"):
        return _chain_key(name.removeprefix("rollout/")), "rollout"
    return name, "train"


def _interval_ends(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the names of `low` and `high` of each held-out metric with an interval."""
    ends: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        match = _END.fullmatch(name)
        if match and _HELD_OUT.fullmatch(name):
            ends[match[1]][match[2]] = name
    known = set(names)
    return {name: pair for name, pair in ends.items() if name in known and len(pair) == 2}


def _chain_key(name: str) -> str:
    if match := _OF_A_SOURCE.fullmatch(name):
        return f"{match[1]}{_chain_key(match[2])}"
    return name if name in ("reward", "success") else f"trajectory/{name}"


def _look_up(key: str, table: Sequence[Metric]) -> Metric | None:
    for metric in table:
        parts = re.split(r"<[^>]+>", metric.name)
        if re.fullmatch(".+".join(map(re.escape, parts)), key):
            return metric
    return None


def _chart(key: str, lines: list[dict[str, str]]) -> dict[str, Any]:
    metric = meaning_of(key)
    meaning = metric.meaning if metric else "a metric of the task" if key.startswith("trajectory/") else ""
    if key.startswith("trajectory/"):
        meaning += " (mean over chains)"
    return {
        "key": key,
        "title": key.removeprefix("trajectory/"),
        "unit": metric.unit if metric else "",
        "meaning": meaning,
        "lines": lines,
    }


def _ratios(by_key: dict[str, dict[str, str]]) -> dict[str, dict[str, Any]]:
    calls, unknown = by_key.get("trajectory/tool_calls", {}), by_key.get("trajectory/tool_errors/unknown_tool", {})
    made = {"unknown-tool rate": (unknown, calls, "", "share of the calls to tools that do not exist")}
    for key in list(by_key):
        if match := _CALLS.fullmatch(key):
            tool, calls = match[1], by_key[key]
            seconds = by_key.get(f"trajectory/tool/{tool}/seconds", {})
            errors = by_key.get(f"trajectory/tool/{tool}/errors", {})
            made[f"latency of {tool}"] = (seconds, calls, "s", f"mean time of a call of {tool}")
            made[f"error rate of {tool}"] = (errors, calls, "", f"share of the calls of {tool} that returned an error")
    found = {}
    for key, (above, below, unit, meaning) in made.items():
        lines = [{"kind": kind, "name": above[kind], "per": below[kind]} for kind in above if kind in below]
        if lines:
            found[key] = {"key": key, "title": key, "unit": unit, "meaning": meaning, "lines": lines}
    return found


def _own(found: dict[str, Any]) -> list[str]:
    return [key for key in found if key.startswith("trajectory/") and meaning_of(key) is None]


def series_of(lines: Sequence[dict[str, Any]], start: int) -> dict[str, Any]:
    """Return the metrics of `lines` from number `start` on: `from` is the first line's number, `lines` that after the
    last, `series` has per name `y`, the finite numbers, and `at`, the numbers of their lines, unless all have it."""
    new = lines[start:]
    at: dict[str, list[int]] = {}
    y: dict[str, list[float]] = {}
    for number, line in enumerate(new, start):
        for name, value in line.items():
            if name not in y:
                at[name], y[name] = [], []
            if type(value) is int or (type(value) is float and math.isfinite(value)):
                at[name].append(number)
                y[name].append(value)
    series = {
        name: {"y": values} if len(values) == len(new) else {"at": at[name], "y": values} for name, values in y.items()
    }
    return {"from": start, "lines": start + len(new), "series": series}

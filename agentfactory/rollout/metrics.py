"""Descriptions of the metrics of chains and of evaluations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric of metrics.jsonl. `<...>` in a name stands for a part that the run fills in."""

    name: str
    unit: str
    meaning: str


CHAIN_METRICS = [
    Metric("success", "", "whether the task was solved, as the reward or the environment says"),
    Metric("reward/<reward>", "", "value of one reward of the recipe, before its weight"),
    Metric("tool_calls", "calls", "calls that the chain made, those that were refused too"),
    Metric("tool/<tool>/calls", "calls", "calls of this tool"),
    Metric("tool/<tool>/errors", "calls", "calls of this tool that gave an error"),
    Metric("tool/<tool>/seconds", "s", "time that the calls of this tool took, added up"),
    Metric("tool_errors/malformed_call", "turns", "turns that looked like a call and could not be parsed"),
    Metric("tool_errors/unknown_tool", "calls", "calls of a tool that there is not"),
    Metric("tool_errors/invalid_arguments", "calls", "calls whose arguments do not fit the tool's schema"),
    Metric("tool_errors/tool_error", "calls", "calls that the tool itself answered with an error"),
    Metric("tool_errors/tool_timeout", "calls", "calls that took longer than they may"),
    Metric("tool_errors/tool_limit", "calls", "calls that a limit refused or cut short"),
    Metric("tool_seconds", "s", "time in which at least one call was running"),
    Metric("tool_wait_seconds", "s", "time that calls waited for limits.calls_per_second"),
    Metric("tool_cost", "", "cost of the calls by limits.cost"),
    Metric("truncated_turns", "turns", "turns that were cut at rollout.max_tokens"),
    Metric("sampled_tokens", "tokens", "tokens that the model sampled"),
    Metric("rows", "rows", "token rows of the chain: more than one where its history was rewritten or shortened"),
    Metric("penalty", "", "what limits and rollout.outcome_penalty took off the reward"),
    Metric("limits/<limit>", "", "how often this limit was reached"),
    Metric("stop/<reason>", "", "whether this ended the chain"),
    Metric("failed", "", "share of the chains that broke"),
]
"""The `metrics` of a trajectory, `trajectory/<name>` in metrics.jsonl."""

EVAL_METRICS = [
    Metric("avg@<k>", "", "success of the k chains of a task, mean over tasks"),
    Metric("pass@<k>", "", "chance that one of k chains passes, without bias (arXiv:2107.03374), mean over tasks"),
    Metric("<figure>/low", "", "lower end of the figure's 95 % bootstrap interval over tasks (`agentfactory eval`)"),
    Metric("<figure>/high", "", "upper end of the same"),
    Metric("source/<source>/<figure>", "", "the figure over the tasks whose field `source` says so"),
]
"""Evaluation metrics in addition to those of the chains, under `eval/sampled/` and `eval/greedy/`."""

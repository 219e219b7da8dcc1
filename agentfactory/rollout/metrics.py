"""Descriptions of chain and evaluation metrics."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A metric of metrics.jsonl. `<...>` in a name is a placeholder."""

    name: str
    unit: str
    meaning: str


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

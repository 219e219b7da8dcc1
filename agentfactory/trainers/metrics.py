"""The training loops' metrics: a table of their descriptions, and the metrics computed from a batch's groups."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

from agentfactory.rollout.trajectory import Group


@dataclass(frozen=True)
class Metric:
    """A metric of metrics.jsonl. `<...>` in a name is a placeholder."""

    name: str
    unit: str
    meaning: str


METRICS = [
    Metric("step", "", "training step, from 1; 0 is before the first step"),
    Metric("version", "", "version of the weights at the end of the step"),
    Metric("loss", "", "the algorithm's loss, weighted mean over the step's trained tokens"),
    Metric("grad_norm", "", "Euclidean norm of the gradient before it is scaled down to train.max_grad_norm"),
    Metric("learning_rate", "", "learning rate of the step's updates"),
    Metric("tokens", "tokens", "trained tokens of the step, over all processes"),
    Metric("tokens_per_second", "tokens/s", "trained tokens divided by the seconds of the whole step"),
    Metric("seconds/step", "s", "the whole step, without evaluation and checkpoints"),
    Metric("seconds/wait", "s", "waiting for groups"),
    Metric("seconds/update", "s", "batching, forward, backward and optimiser"),
    Metric("seconds/teacher", "s", "forward passes of teacher.model in the trainer; part of seconds/update"),
    Metric("seconds/sync", "s", "loading the new weights into the server, including the proof"),
    Metric("seconds/sleep", "s", "time_share: putting the server to sleep"),
    Metric("seconds/bring_in", "s", "time_share: moving the trainer's tensors to its device"),
    Metric("seconds/park", "s", "time_share: moving the trainer's tensors to host memory"),
    Metric("seconds/wake", "s", "time_share: waking the server; part of seconds/sync"),
    Metric("seconds/eval", "s", "evaluation on held-out tasks"),
    Metric("sync/bytes", "bytes", "size of the weights sent to the server"),
    Metric("sync/provable", "", "1 if the weights changed enough since the last proof for the canary to prove them"),
    Metric("sync/canary_drift", "nats", "the trainer's change in log-probability since that proof, root mean square"),
    Metric("sync/canary_slope", "", "the server's change over the trainer's, if provable: 1 follows, 0 is stale"),
    Metric("sync/canary_cache_gap", "nats", "server's scores with minus without prefix cache, root mean square"),
    Metric("sync/canary_noise", "nats", "noise of scoring the same weights twice, measured at the start"),
    Metric("reward", "", "mean reward of the chains that have one"),
    Metric("reward_std", "", "standard deviation of the chains' rewards over the batch"),
    Metric("success", "", "mean of the trajectories' `success`"),
    Metric("trajectory/<metric>", "", "mean of a trajectory metric over the chains that have it"),
    Metric("turns", "", "mean number of assistant turns of a chain"),
    Metric("outcome/<outcome>", "", "share of the chains with this outcome"),
    Metric("groups/equal_rewards", "", "share of the groups whose rewards are all equal: they give no gradient"),
    Metric("staleness/mean", "versions", "age of a token's sampling weights when it is trained, mean over tokens"),
    Metric("staleness/max", "versions", "age of a token's sampling weights when it is trained, maximum over the batch"),
    Metric("staleness/untrained", "", "late_chains=baseline: share of the sampled tokens that are too old to train"),
    Metric("staleness/recomputed", "", "context tokens that servers recomputed for new weights, per token of the rows"),
    Metric("prefix/hit_share", "", "share of the prompt tokens that servers found in their prefix caches"),
    Metric(
        "prefix/recomputed",
        "",
        "prompt tokens that servers computed again without new weights, over those that they computed once",
    ),
    Metric("prefix/moved", "", "how often a chain went on at another server or replica than before"),
    Metric("cancelled/groups", "", "groups that rollout.max_staleness cancelled while the batch was created"),
    Metric(
        "cancelled/chains", "", "chains of these groups, and chains that it cancelled in groups trained without them"
    ),
    Metric("cancelled/tokens", "tokens", "length of these chains, including prompts and tool results"),
    Metric("started/success_least", "", "success over ended and cancelled chains, if none of the latter had succeeded"),
    Metric("started/success_most", "", "success over ended and cancelled chains, if all of the latter had succeeded"),
    Metric("chains", "", "chains that ended while the batch was created, including chains dropped or run again"),
    Metric("filtered/groups", "", "groups that rollout.equal_rewards left out while the batch was created"),
    Metric("filtered/<outcome>", "", "chains with this outcome that were dropped or run again (rollout.on_outcome)"),
    Metric("environments/<server>/<gauge>", "", "state of the pool at delivery of the batch: in_use, idle, waiting"),
    Metric("environments/<server>/<count>", "", "instances since the start: made, recycled, broken"),
    Metric("environments/<server>/<name>", "", "a value from its gauges(), such as cache_hits and cache_misses"),
    Metric("source/<name>/<metric>", "", "data.sources: a metric of the batch's chains, over those of a source"),
    Metric("source/<name>/groups", "", "data.sources: share of the batch's groups that a source has"),
    Metric("sources/passed_over", "", "places of sources that data.curriculum skipped while the batch was created"),
    Metric("sources/solved", "", "sources that are now solved"),
    Metric("sources/hopeless", "", "sources that are now hopeless"),
    Metric("curriculum/passed_over", "", "tasks that rollout.curriculum skipped while the batch was created"),
    Metric("curriculum/solved", "", "tasks that are now solved"),
    Metric("curriculum/hopeless", "", "tasks that are now hopeless"),
    Metric("step_groups/turns", "", "gigpo: share of the turns that are compared with others in the same state"),
    Metric("step_groups/size", "", "gigpo: mean number of turns that are compared with each other"),
    Metric("clip_fraction", "", "share of the tokens whose probability ratio is clipped, mean over updates"),
    Metric("entropy", "nats", "mean entropy of the policy at the trained tokens, before the step's first update"),
    Metric("mismatch/mean", "nats", "mean |trainer - server| log-probability of the trained tokens, before the update"),
    Metric("mismatch/max", "nats", "largest |trainer - server| log-probability of a trained token, before the update"),
    Metric("mismatch/mixed", "nats", "mismatch/mean over tokens with a cached context of older weights, if any"),
    Metric("mixed_tokens", "", "share of tokens with a cached context of older weights (rollout.inflight: keep)"),
    Metric("mismatch/corrected", "", "share of the tokens whose mismatch ratio train.loss.mismatch limits"),
    Metric("kl", "nats", "KL from the reference by train.loss.kl.estimator, mean over tokens, before the update"),
    Metric("teacher/kl", "nats", "teacher.divergence before the update, mean over graded tokens; sampled: estimated"),
    Metric("teacher/graded", "", "teacher.context: share of the trained rows that the teacher grades"),
    Metric("critic/loss", "", "half the squared error of the critic's values, mean over tokens and updates"),
    Metric("critic/clip_fraction", "", "share of the tokens whose value is clipped, mean over updates"),
    Metric("critic/explained_variance", "", "1 - variance of (return - value) / variance of returns; 1 is perfect"),
    Metric("mismatch/format", "nats", "mismatch/mean over tokens of the tool-call format: tags, names, ends of turns"),
    Metric("mismatch/arguments", "nats", "mismatch/mean over tokens of argument values"),
    Metric("mismatch/text", "nats", "mismatch/mean over tokens of words outside calls"),
    Metric("mismatch/age/<versions>", "nats", "mismatch/mean over tokens that are this many versions old"),
    Metric("mismatch/behaviour_kl", "nats", "KL(policy || behaviour), which train.loss.behaviour_kl scales, mean"),
    Metric("mismatch/kl", "nats", "KL(server || trainer) by the k3 estimate, mean over tokens, before the update"),
    Metric("eval/<metric>", "", "a metric that the rollout worker measures on held-out tasks"),
]


def group_metrics(groups: list[Group], ages: Counter[int], sources: Sequence[str] = ()) -> dict[str, float]:
    """Return means over a batch's chains, and over those of each of `sources`. `ages` counts tokens by age."""
    metrics = _means(groups)
    if ages:
        rows = [row for group in groups for chain in group.trajectories for row in chain.rows]
        changes = [pair for row in rows for pair in pairwise(row.versions) if pair[0].version != pair[1].version]
        recomputed = sum(old.end for old, new in changes if not new.mixed)
        metrics |= {
            "staleness/mean": fmean(ages, weights=ages.values()),
            "staleness/max": max(ages),
            "staleness/recomputed": recomputed / max(1, sum(len(row.token_ids) for row in rows)),
        }
    for name in sources:
        own = [group for group in groups if group.source == name]
        of_source = {"groups": len(own) / len(groups), **(_means(own) if own else {})}
        metrics |= {f"source/{name}/{key}": value for key, value in of_source.items()}
    return metrics


def _means(groups: list[Group]) -> dict[str, float]:
    chains = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [chain.reward for chain in chains if chain.reward is not None]
    # lone chains are compared with each other
    compared = [[chain for chain in group.trajectories if chain.reward is not None] for group in groups]
    if all(len(group.trajectories) == 1 for group in groups):
        compared = [[chain for chains in compared for chain in chains]]
    equal = fmean(len({(chain.reward, *(chain.turn_rewards or ())) for chain in chains}) < 2 for chains in compared)
    metrics = {
        "reward": fmean(rewards) if rewards else 0.0,
        "reward_std": pstdev(rewards) if rewards else 0.0,
        "turns": fmean(chain.turns for chain in chains),
        "groups/equal_rewards": equal,
    }
    for name in sorted({name for chain in chains for name in chain.metrics}):
        mean = fmean(chain.metrics[name] for chain in chains if name in chain.metrics)
        metrics["success" if name == "success" else f"trajectory/{name}"] = mean
    for outcome in sorted({chain.outcome for chain in chains}):
        metrics[f"outcome/{outcome}"] = fmean(chain.outcome == outcome for chain in chains)
    return metrics


def bounds_of_success(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return bounds of the success of all started chains if the staleness bound cancelled some, else nothing."""
    success, ended, cancelled = (metrics.get(name, 0.0) for name in ("success", "chains", "cancelled/chains"))
    if not cancelled or "success" not in metrics:
        return {}
    started = ended + cancelled
    least = success * ended / started
    return {"started/success_least": least, "started/success_most": least + cancelled / started}

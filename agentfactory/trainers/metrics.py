"""The training loops' metrics: a table of their descriptions, and those computed from a batch's groups."""

from collections import Counter
from statistics import fmean, pstdev

from agentfactory.rollout.metrics import Metric
from agentfactory.rollout.trajectory import Group

METRICS = [
    Metric("step", "", "training step, from 1; 0 is before the first"),
    Metric("version", "", "version of the weights that the step ended with"),
    Metric("loss", "", "the algorithm's loss, a mean over the step's trained tokens (by their weight)"),
    Metric("grad_norm", "", "Euclidean norm of the gradient before it is scaled down to train.max_grad_norm"),
    Metric("learning_rate", "", "of the step's updates"),
    Metric("tokens", "tokens", "trained tokens of the step, all processes"),
    Metric("tokens_per_second", "tokens/s", "trained tokens over the seconds of the whole step"),
    Metric("seconds/step", "s", "the whole step; evaluation and checkpoints are not in it"),
    Metric("seconds/wait", "s", "waiting for groups"),
    Metric("seconds/update", "s", "batching, forward, backward and optimiser"),
    Metric("seconds/sync", "s", "bringing the new weights into the server, proof included"),
    Metric("seconds/sleep", "s", "time_share: sending the server to sleep"),
    Metric("seconds/bring_in", "s", "time_share: the trainer's tensors to its device"),
    Metric("seconds/park", "s", "time_share: the trainer's tensors to the host's memory"),
    Metric("seconds/wake", "s", "time_share: waking the server; it is part of seconds/sync"),
    Metric("seconds/eval", "s", "evaluation on held-out tasks"),
    Metric("sync/bytes", "bytes", "size of the weights that travelled to the server"),
    Metric("sync/provable", "", "1 where the weights changed enough since the last proof to prove them by the canary"),
    Metric("sync/canary_drift", "nats", "the trainer's change of log-probability since that proof, root mean square"),
    Metric(
        "sync/canary_slope", "", "the server's change over the trainer's, where it is provable: 1 follows, 0 is stale"
    ),
    Metric("sync/canary_cache_gap", "nats", "server with its prefix cache against without, root mean square"),
    Metric("sync/canary_noise", "nats", "of scoring the same weights twice, as measured at the start"),
    Metric("reward", "", "mean reward of the chains that have one"),
    Metric("reward_std", "", "standard deviation of the same over the batch"),
    Metric("success", "", "mean of the trajectories' `success`"),
    Metric("trajectory/<metric>", "", "mean of a trajectory metric over the chains that have it"),
    Metric("turns", "", "mean number of assistant turns of a chain"),
    Metric("outcome/<outcome>", "", "share of the chains that ended so"),
    Metric("groups/equal_rewards", "", "share of the groups without two different rewards: they teach nothing"),
    Metric("staleness/mean", "versions", "age of the weights behind a token when it is trained, mean over tokens"),
    Metric("staleness/max", "versions", "the same, largest of the batch"),
    Metric("cancelled/groups", "", "groups that rollout.max_staleness cancelled while the batch was made"),
    Metric("cancelled/chains", "", "chains that it ended, of these groups and of those that were trained without them"),
    Metric("cancelled/tokens", "tokens", "length of these chains, prompts and tool results included"),
    Metric("filtered/groups", "", "groups of equal rewards that rollout.equal_rewards left out meanwhile"),
    Metric("filtered/<outcome>", "", "chains that ended so and were dropped or run again (rollout.on_outcome)"),
    Metric("environments/<server>/<gauge>", "", "of its pool when the batch is delivered: in_use, idle, waiting now"),
    Metric("environments/<server>/<count>", "", "instances since the start: made, recycled, broken"),
    Metric("curriculum/passed_over", "", "tasks that rollout.curriculum passed over meanwhile"),
    Metric("curriculum/solved", "", "tasks that are solved by now"),
    Metric("curriculum/hopeless", "", "tasks that are hopeless by now"),
    Metric("clip_fraction", "", "share of the tokens whose probability ratio is clipped, mean over updates"),
    Metric("entropy", "nats", "mean entropy of the policy at the trained tokens, before the step's first update"),
    Metric("mismatch/mean", "nats", "mean |trainer - server| log-probability of the trained tokens, before the update"),
    Metric("mismatch/max", "nats", "the same, largest of the batch"),
    Metric("mismatch/mixed", "nats", "mismatch/mean of the tokens whose cached context is of older weights, if any"),
    Metric("mixed_tokens", "", "share of such tokens (rollout.inflight: keep)"),
    Metric("mismatch/corrected", "", "share of the tokens whose mismatch ratio train.loss.mismatch limits"),
    Metric("kl", "nats", "distance to the reference by train.loss.kl.estimator, mean over tokens, before the update"),
    Metric("critic/loss", "", "half the squared error of the critic's values, mean over tokens and updates"),
    Metric("critic/clip_fraction", "", "share of the tokens whose value is clipped, mean over updates"),
    Metric("critic/explained_variance", "", "1 - variance of (return - value) / variance of returns; 1 is perfect"),
    Metric("mismatch/format", "nats", "mismatch/mean of the tokens of the format: tags, names, ends of turns"),
    Metric("mismatch/arguments", "nats", "mismatch/mean of the tokens of arguments' values"),
    Metric("mismatch/text", "nats", "mismatch/mean of the tokens of words, those outside of calls"),
    Metric("mismatch/age/<versions>", "nats", "mismatch/mean of the tokens that are so many versions old"),
    Metric("mismatch/behaviour_kl", "nats", "KL(policy || behaviour) as train.loss.behaviour_kl weighs it, mean"),
    Metric("mismatch/kl", "nats", "KL(server || trainer) by the k3 estimate, mean over tokens, before the update"),
    Metric("eval/<metric>", "", "what the rollout worker measures on held-out tasks"),
]


def group_metrics(groups: list[Group], ages: Counter[int]) -> dict[str, float]:
    """Returns means over the chains of a batch. `ages` counts tokens by age in versions; if empty, staleness is left
    out."""
    chains = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [chain.reward for chain in chains if chain.reward is not None]
    metrics = {
        "reward": fmean(rewards) if rewards else 0.0,
        "reward_std": pstdev(rewards) if rewards else 0.0,
        "turns": fmean(chain.turns for chain in chains),
        "groups/equal_rewards": fmean(_all_equal(group) for group in groups),
    }
    for name in sorted({name for chain in chains for name in chain.metrics}):
        mean = fmean(chain.metrics[name] for chain in chains if name in chain.metrics)
        metrics["success" if name == "success" else f"trajectory/{name}"] = mean
    for outcome in sorted({chain.outcome for chain in chains}):
        metrics[f"outcome/{outcome}"] = fmean(chain.outcome == outcome for chain in chains)
    if ages:
        metrics |= {"staleness/mean": fmean(ages, weights=ages.values()), "staleness/max": max(ages)}
    return metrics


def _all_equal(group: Group) -> bool:
    rewards = {(t.reward, *(t.turn_rewards or ())) for t in group.trajectories if t.reward is not None}
    return len(rewards) < 2

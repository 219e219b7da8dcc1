"""avg@k and pass@k against an independent reference: enumeration."""

from collections import Counter
from itertools import combinations

import pytest

from agentfactory.rollout.evaluation.pass_at_k import by_source, estimates, mean_figures, pass_at_k, sample_figures
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.metrics import group_metrics


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(samples: int) -> None:
    for passed in range(samples + 1):
        outcomes = [1] * passed + [0] * (samples - passed)
        for k in range(1, samples + 1):
            choices = [any(choice) for choice in combinations(outcomes, k)]
            assert pass_at_k(samples, passed, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_pass_at_k_of_more_than_was_sampled_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@4 of 3 samples"):
        pass_at_k(3, 1, 4)
    with pytest.raises(ValueError, match="4 of 3"):
        pass_at_k(3, 4, 2)


def test_means_cover_the_chains_that_have_the_value() -> None:
    """As docs/metrics.md says, and as training does; a lacking value counted as 0 here."""
    metrics: list[dict[str, float]] = [{"success": 1.0, "extra": 5.0}, {}, {"success": 0.0}, {}]
    chains = [Trajectory("c", [], [], Outcome.COMPLETED, reward=1.0, metrics=each) for each in metrics]
    groups = [Group("g", {"question": "?"}, chains)]
    assert mean_figures(chains) == {"failed": 0.0, "reward": 1.0, "success": 0.5, "extra": 5.0}
    assert group_metrics(groups, Counter())["success"] == 0.5
    found = {name: one.value for name, one in estimates(groups, 4).items()}
    assert found == {"reward": 1.0, "success": 0.5, "avg@4": 0.5, "pass@1": 0.5, "pass@2": 1.0}


def group(number: int, *successes: float | None, **task: object) -> Group:
    chains = [Trajectory(f"{number}.{sample}", [], [], Outcome.COMPLETED) for sample in range(len(successes))]
    for chain, success in zip(chains, successes, strict=True):
        if success is None:
            chain.outcome = Outcome.INFERENCE_ERROR
        else:
            chain.reward, chain.metrics = 2 * success, {"success": success}
    return Group(str(number), {"question": "?", **task}, chains)


def test_figures_of_an_evaluation() -> None:
    groups = [group(0, 1, 1, 1, 1), group(1, 1, 0, 0, 0), group(2, 0, 0, 0, 0), group(3, 1, None, 0, None)]
    assert sample_figures(groups, 4) == {
        "avg@4": pytest.approx((1 + 0.25 + 0 + 0.5) / 4),
        "pass@1": pytest.approx((1 + 0.25 + 0 + 0.5) / 4),
        "pass@2": pytest.approx((1 + 0.5 + 0 + 1) / 4),
        # two chains of the last task remain, too few for k = 4
        "pass@4": pytest.approx((1 + 1 + 0) / 3),
    }
    found = estimates(groups, 4)
    assert found["success"].value == pytest.approx(6 / 14), "a mean over chains"
    assert found["reward"].value == pytest.approx(12 / 14)
    assert (found["pass@4"].tasks, found["pass@2"].tasks) == (3, 4)
    for figure in found.values():
        assert figure.low <= figure.value <= figure.high
    assert {name: found[name].value for name in found if "@" in name} == sample_figures(groups, 4)


def test_what_does_not_say_it_has_no_figure() -> None:
    chain = Trajectory("0.0", [], [], Outcome.COMPLETED, reward=0.5)
    rewarded = [Group("0", {}, [chain]), group(1, None)]
    assert sample_figures(rewarded, 2) == {}
    assert list(estimates(rewarded, 2)) == ["reward"]
    assert estimates([group(0, None, None)], 2) == {}
    assert sample_figures([group(0, 1.0)], 1) == {}


def test_partial_success_is_averaged_and_does_not_pass() -> None:
    figures = sample_figures([group(0, 0.5, 0.5)], 2)
    assert figures == {"avg@2": 0.5, "pass@1": 0.0, "pass@2": 0.0}


def test_sources() -> None:
    groups = [group(0, 1, source="aime"), group(1, 0), group(2, 0, source="aime")]
    found = {name: [one.id for one in part] for name, part in by_source(groups).items()}
    assert found == {"aime": ["0", "2"], "none": ["1"]}
    assert by_source([group(0, 1), group(1, 0, source="")]) == {}
    assert set(by_source([group(0, 1, source=0), group(1, 0, source=1)])) == {"0", "1"}

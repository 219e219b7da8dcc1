"""Losses compared with hand-computed values and float64 autograd; tests/trainers/test_trl.py compares them with
TRL's."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentfactory.trainers.config import LossConfig, MismatchConfig
from agentfactory.trainers.update.losses import (
    PolicyLoss,
    behaviour_kl,
    kl,
    negative_log_likelihood,
    token_weights,
    value_loss,
)
from agentfactory.trainers.update.policy_update import mismatch_weights

pytestmark = pytest.mark.numbers

ONE_ROW = torch.zeros(8, dtype=torch.int64)


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_ratios(config: LossConfig, ratios: Tensor, advantage: Tensor, sequence: Tensor = ONE_ROW) -> Any:
    """Evaluate `PolicyLoss` with policy probabilities of `ratios` times the proximal ones, which are exp(-1)."""
    proximal = torch.full_like(ratios, -1.0)
    return PolicyLoss(config)(
        logprob=proximal + ratios.log(), proximal=proximal, advantage=advantage, sequence=sequence[: len(ratios)]
    )


LOG3, LOG8 = math.log(3), math.log(8)
SOFT = 4 / 1.05 * 3**1.05 / (1 + 3**1.05)
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


@pytest.mark.parametrize(
    ("config", "ratios", "advantages", "terms", "clipped"),
    [
        # 1.3 x 2; -1.5 x 2; 0.5 x 2; -0.8 x 2; 1.1 x 1
        (
            {"options": CLIP},
            [1.5, 1.5, 0.5, 0.5, 1.1],
            [2, -2, 2, -2, 1],
            [-2.6, 3.0, -1.0, 1.6, -1.1],
            [1, 0, 0, 1, 0],
        ),
        # a ratio counts as at most 3 if the advantage is negative, and clip_high bounds it if it is positive
        ({"options": {**CLIP, "dual_clip": 3.0}}, [5, 5, 2, 0.5], [-2, 2, -2, -2], [6.0, -2.6, 4.0, 1.6], [1, 1, 0, 1]),
        # weights 1/2 and, of 8, at most 5; log-probabilities -1 + log of the ratio
        (
            {"policy": "cispo", "options": {"clip_high": 4.0}},
            *([0.5, 8, 8], [2, 1, -1], [1 + math.log(2), 5 * (1 - LOG8), -5 * (1 - LOG8)], [0, 1, 1]),
        ),
        # temperatures 1 and 1.05: 4 / t sigmoid(t (r - 1)); sigmoid(t log 3) = 3^t / (1 + 3^t)
        ({"policy": "sapo"}, [1, 1, 1 + LOG3, 1 + LOG3], [3, -3, 1, -1], [-6, 6 / 1.05, -3, SOFT], [0] * 4),
        ({"policy": "reinforce"}, [1, math.e], [2, -3], [2, 0], [0, 0]),
    ],
)
def test_policy_losses_by_hand(
    config: Any, ratios: list[float], advantages: list[float], terms: list[float], clipped: list[int]
) -> None:
    found, stopped = of_ratios(LossConfig(**config), double(*ratios), double(*advantages))
    assert found.tolist() == pytest.approx(terms)
    assert stopped.tolist() == [bool(flag) for flag in clipped]


def test_sequence_ratio_by_hand() -> None:
    """Ratios 2 and 1/2 make 1, ratios 4 and 1 make 2, which is clipped at 1.5 where that is the smaller gain."""
    config = LossConfig(policy="gspo", options={"clip_low": 0.5, "clip_high": 0.5})
    sequence = torch.tensor([0, 0, 1, 1])
    terms, clipped = of_ratios(config, double(2, 0.5, 4, 1), double(1, 1, 1, 1), sequence)
    assert terms.tolist() == pytest.approx([-1, -1, -1.5, -1.5])
    assert clipped.tolist() == [False, False, True, True]
    terms, clipped = of_ratios(config, double(2, 0.5, 4, 1), double(1, -3, -1, -1), sequence)
    assert terms.tolist() == pytest.approx([-1, 3, 2, 2])
    assert not clipped.any()


POLICIES: list[dict[str, Any]] = [
    {"policy": "clip"},
    {"policy": "clip", "options": {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5}},
    {"policy": "gspo", "options": {"clip_low": 0.05, "clip_high": 0.1}},
    {"policy": "cispo", "options": {"clip_high": 0.2}},
    {"policy": "sapo"},
    {"policy": "reinforce"},
]


@pytest.mark.parametrize("settings", [s for s in POLICIES if s["policy"] != "cispo"])
def test_gradients_are_those_of_the_values(settings: dict[str, Any]) -> None:
    """float64 finite differences of the sum over tokens, off policy, with one advantage per sequence (for gspo, whose
    gradient flows through each token separately)."""
    torch.manual_seed(0)
    sequence = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    proximal = -3 * torch.rand(8, dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)[sequence]
    logprob = (proximal + 0.4 * torch.randn(8, dtype=torch.float64)).requires_grad_()
    config = LossConfig(**settings)
    terms, clipped = PolicyLoss(config)(logprob=logprob, proximal=proximal, advantage=advantage, sequence=sequence)
    assert clipped.any() == (settings["policy"] in ("clip", "gspo"))
    assert torch.autograd.gradcheck(
        lambda x: PolicyLoss(config)(logprob=x, proximal=proximal, advantage=advantage, sequence=sequence)[0].sum(),
        logprob,
    )
    # clipped terms have no gradient
    (gradient,) = torch.autograd.grad(terms.sum(), logprob)
    assert torch.equal(gradient == 0, clipped)


def mismatch(correction: str, **bounds: float) -> MismatchConfig:
    """Return the correction with the bounds that it supports."""
    kind = MismatchConfig.options_type(correction)
    options = {name: bound for name, bound in bounds.items() if name in kind.model_fields}
    return MismatchConfig.model_validate({"correction": correction, "options": options})


@pytest.mark.parametrize(
    ("correction", "bounds", "ratios", "weights"),
    [
        # of two rows
        ("none", (0.5, 2.0), [4, 0.25, 0.8, 1.5], [1, 1, 1, 1]),
        ("token_truncate", (0.5, 2.0), [4, 0.25, 0.8, 1.5], [2.0, 0.25, 0.8, 1.5]),
        ("token_mask", (0.5, 2.0), [4, 0.25, 0.8, 1.5], [0, 0, 0.8, 1.5]),
        # 4 x 0.25 and 0.8 x 1.5
        ("sequence_truncate", (0.5, 2.0), [4, 0.25, 0.8, 1.5], [1, 1, 1.2, 1.2]),
        ("sequence_mask", (0.5, 2.0), [4, 0.25, 0.8, 1.5], [1, 1, 1.2, 1.2]),
        ("geometric_mask", (0.5, 2.0), [4, 0.25, 0.8, 1.5], [1, 1, 1, 1]),
        # 1.5 x 1; the square root of 1.5 is 1.22
        ("sequence_truncate", (0.9, 1.23), [1.5, 1, 0.5, 1], [1.23, 1.23, 0.5, 0.5]),
        ("sequence_mask", (0.9, 1.23), [1.5, 1, 0.5, 1], [0, 0, 0, 0]),
        ("geometric_mask", (0.9, 1.23), [1.5, 1, 0.5, 1], [1, 1, 0, 0]),
    ],
)
def test_mismatch_weights_by_hand(
    correction: str, bounds: tuple[float, float], ratios: list[float], weights: list[float]
) -> None:
    config = mismatch(correction, low=bounds[0], high=bounds[1])
    given, _ = mismatch_weights(config, double(*ratios).log().requires_grad_(), torch.tensor([0, 0, 1, 1]))
    assert given.tolist() == pytest.approx(weights)
    assert not given.requires_grad


def test_a_mismatch_beyond_all_bounds_stays_finite() -> None:
    """The server gave a token probability 0, or almost 0."""
    log_ratio = torch.tensor([float("inf"), 1e4, -1e4, 0.0])
    for correction, weights in [("token_truncate", [2, 2, 0, 1]), ("token_mask", [0, 0, 0, 1])]:
        config = MismatchConfig(correction=correction)
        assert mismatch_weights(config, log_ratio, torch.arange(4))[0].tolist() == weights


@pytest.mark.parametrize(
    "correction", ["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"]
)
def test_only_limited_tokens_count_as_corrected(correction: Any) -> None:
    """Ratios of 1 are within bounds that end at 1; ratios of 8 and 1/8 are not within [0.5, 1]."""
    config, rows = mismatch(correction, low=0.5, high=1.0), torch.arange(3)
    assert not mismatch_weights(config, torch.zeros(3, dtype=torch.float64), rows)[1].any()
    limited = mismatch_weights(config, double(8, 1, 0.125).log(), rows)[1].tolist()
    assert limited == ([False] * 3 if correction == "none" else [True, False, correction.endswith("mask")])


def test_distances_by_hand() -> None:
    # the policy gives the token twice, and half, the probability of the reference
    logprob, reference = double(0, 0), double(2, 0.5).log().neg()
    log2 = math.log(2)
    assert kl("k1", logprob, reference).tolist() == pytest.approx([log2, -log2])
    assert kl("k2", logprob, reference).tolist() == pytest.approx([log2**2 / 2, log2**2 / 2])
    assert kl("k3", logprob, reference).tolist() == pytest.approx([0.5 - 1 + log2, 2 - 1 - log2])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_distances_estimate_what_their_docstring_says(estimator: Any) -> None:
    """The mean of the values, and of the gradients, over a whole vocabulary, weighted by the policy."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(0)
    logprob = logits.log_softmax(0)
    policy = logprob.exp().detach()
    forward = (logprob.exp() * (logprob - reference)).sum()
    backward = (reference.exp() * (reference - logprob)).sum()
    values = (policy * kl(estimator, logprob, reference)).sum()
    if estimator != "k2":
        assert values.item() == pytest.approx(forward.item(), abs=1e-12)
    (given,) = torch.autograd.grad(values, logits, retain_graph=True)
    wanted = {"k1": 0 * forward, "k2": forward, "k3": backward}[estimator]
    torch.testing.assert_close(given, torch.autograd.grad(wanted, logits)[0], rtol=0, atol=1e-12)
    point = logprob.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl(estimator, x, reference), point)


def test_value_loss_by_hand() -> None:
    """Before the update 1, clip 0.5. Return 3: from 2, 1.5 counts; from 1.2 and 0 itself. Return 1: from 2, itself."""
    value, old, target = double(2, 1.2, 0, 2), double(1, 1, 1, 1), double(3, 3, 3, 1)
    terms, clipped = value_loss(value, old, target, 0.5)
    assert terms.tolist() == pytest.approx([1.5**2 / 2, 1.8**2 / 2, 3**2 / 2, 1 / 2])
    assert clipped.tolist() == [True, False, False, False]
    terms, clipped = value_loss(value, old, target, None)
    assert terms.tolist() == pytest.approx([1 / 2, 1.8**2 / 2, 3**2 / 2, 1 / 2])
    assert not clipped.any()


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_gradients(clip: float | None) -> None:
    torch.manual_seed(0)
    old, target = torch.randn(2, 20, dtype=torch.float64)
    value = (old + 0.4 * torch.randn(20, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, target, clip)[0], value)
    terms, clipped = value_loss(value, old, target, clip)
    (gradient,) = torch.autograd.grad(terms.sum(), value)
    assert torch.equal(gradient == 0, clipped)
    # at the start of an update nothing is clipped, and the gradient is the whole error
    start = old.clone().requires_grad_()
    terms, clipped = value_loss(start, old, target, clip)
    terms.sum().backward()
    torch.testing.assert_close(start.grad, old - target)
    assert not clipped.any()
    # nor are differences by rounding within the bound
    before, after, target = 0.09 * torch.rand(1000), -0.09 * torch.rand(1000), 0.1 * torch.randn(1000)
    assert not value_loss(after, before, target, clip)[1].any()


def test_token_weights_by_hand() -> None:
    """Chains of 4, 0 and 1 tokens: one has none to train, and does not count."""
    lengths = [4, 0, 1]
    assert token_weights(lengths, "token", [100, 100, 100]) == ([1, 1, 1], 5)
    assert token_weights(lengths, "sequence", [100, 100, 100]) == ([0.25, 0, 1], 2)
    assert token_weights(lengths, "sequence_sum", [100, 100, 100]) == ([1, 1, 1], 2)
    assert token_weights(lengths, "constant", [100, 100, 100]) == ([1, 1, 1], 200)
    # (4 / 50 + 1 / 100) / 2
    weights, normaliser = token_weights(lengths, "constant", [50, 50, 100])
    assert (4 * weights[0] + weights[2]) / normaliser == pytest.approx(0.045)


def test_mismatch_kl_by_hand() -> None:
    given = kl("k3", torch.tensor([0.0, 0.0]), torch.tensor([math.log(2.0), 0.0]))
    assert given.tolist() == pytest.approx([2 - 1 - math.log(2.0), 0.0])


def two_outcomes(logprob: Tensor, behaviour: Tensor) -> Tensor:
    """Return KL(policy || behaviour) over {the sampled token, another} by its definition."""
    p, q = logprob.exp(), behaviour.exp()
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def test_the_distance_to_the_behaviour_by_hand_and_by_autograd() -> None:
    # p = 1/2, q = 1/4: log(2) / 2 + log(2/3) / 2
    given = behaviour_kl(double(math.log(0.5)), double(math.log(0.25)))
    assert given.tolist() == pytest.approx([math.log(2) / 2 + math.log(2 / 3) / 2])

    p = double(0.9999, 0.6, 0.3, 1e-4, 0.5).log().requires_grad_()
    q = double(0.5, 0.9999, 0.31, 0.2, 0.5).log()
    ours, defined = behaviour_kl(p, q), two_outcomes(p, q)
    assert torch.allclose(ours, defined, rtol=1e-12, atol=1e-15)
    (gradient,) = torch.autograd.grad(ours.sum(), p, retain_graph=True)
    (expected,) = torch.autograd.grad(defined.sum(), p)
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-12)
    assert ours[-1] == 0
    assert gradient[-1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_distance_to_the_behaviour_is_finite_and_nothing_where_the_two_agree(dtype: torch.dtype) -> None:
    extremes = torch.tensor([0.0, -1e-9, -1e-7, -1e-3, -1.0, -30.0, -9999.0], dtype=dtype)
    policy, behaviour = (values.flatten().clone() for values in torch.meshgrid(extremes, extremes, indexing="ij"))
    policy.requires_grad_()
    distance = behaviour_kl(policy, behaviour)
    (gradient,) = torch.autograd.grad(distance.sum(), policy)
    assert distance.isfinite().all()
    assert gradient.isfinite().all()
    assert (distance >= -1e-5).all()
    same = policy == behaviour
    assert (distance[same] == 0).all()
    assert (gradient[same] == 0).all()
    # float32 log-probabilities of almost certain tokens differ by this much between kernels
    noise = behaviour_kl(torch.tensor([-1e-7, -4e-5], dtype=dtype), torch.tensor([-3e-7, -4.1e-5], dtype=dtype))
    assert noise.abs().max() < 1e-6


def test_negative_log_likelihood() -> None:
    logprob = double(-1, -2).requires_grad_()
    assert negative_log_likelihood(logprob).tolist() == [1, 2]
    assert torch.autograd.gradcheck(negative_log_likelihood, logprob)

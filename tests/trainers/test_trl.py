"""A whole update, from groups to loss and gradient, compared with TRL's GRPOTrainer on the same log-probabilities:
TRL's advantages, importance weights and loss, and our Credit, batches and update_policy."""

import random
import re
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.batches.batch import Batch, make_batches, training_row
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.token_advantages import Credit
from agentfactory.trainers.update.learner import Learner, Loss, Terms, Update
from agentfactory.trainers.update.policy_update import update_policy
from tests.conftest import REPOSITORY
from tests.trainers.conftest import Make, make_row, on_cpu
from tests.trainers.trl_oracle import Chains, GrpoOracle, make_oracle, make_trainer

pytestmark = pytest.mark.numbers

GROUP_SIZE = 4
MAX_TOTAL_TOKENS = 50


@dataclass
class Case:
    name: str
    trl: dict[str, Any]
    loss: dict[str, Any] = field(default_factory=dict)
    advantage: dict[str, Any] = field(default_factory=dict)
    mismatch: tuple[str, float | None, float | None] | None = None
    """Correction, low and high."""


UNBOUNDED = ("cispo", "sapo", "distance to a reference", "all together")
BANDS: tuple[float | None, float | None] = (0.8, 1.25)
CASES = [
    Case("grpo", {"loss_type": "grpo"}, {"normaliser": "sequence"}),
    Case("dapo", {"loss_type": "dapo", "epsilon_high": 0.28}, {"options": {"clip_high": 0.28}}),
    Case(
        "dr_grpo",
        {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": MAX_TOTAL_TOKENS},
        {"normaliser": "constant"},
        {"options": {"scale": "none"}},
    ),
    Case("batch scale", {"loss_type": "dapo", "scale_rewards": "batch"}, {}, {"options": {"scale": "batch"}}),
    Case("sum per chain", {"loss_type": "luspo"}, {"normaliser": "sequence_sum"}),
    Case("dual clip", {"loss_type": "dapo", "delta": 1.4}, {"options": {"dual_clip": 1.4}}),
    Case("cispo", {"loss_type": "cispo", "epsilon_high": 1.2}, {"policy": "cispo", "options": {"clip_high": 0.2}}),
    Case(
        "sapo",
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        {"policy": "sapo", "normaliser": "sequence"},
    ),
    Case(
        "gspo",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
        {"policy": "gspo", "options": {"clip_low": 0.03, "clip_high": 0.04}, "normaliser": "sequence"},
    ),
    Case(
        "gspo, sum per chain, dual clip",
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.03, "delta": 1.05},
        {
            "policy": "gspo",
            "options": {"clip_low": 0.03, "clip_high": 0.03, "dual_clip": 1.05},
            "normaliser": "sequence_sum",
        },
    ),
    Case(
        "distance to a reference",
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False},
        {"kl": {"coefficient": 0.3, "estimator": "k3"}},
    ),
    Case("tokens of high entropy", {"loss_type": "dapo", "top_entropy_quantile": 0.3}, {"top_entropy": 0.3}),
    Case("entropy bonus", {"loss_type": "dapo", "entropy_coef": 0.1}, {"entropy_bonus": 0.1}),
    Case(
        "all together",
        {
            "loss_type": "grpo",
            "epsilon_high": 0.3,
            "delta": 1.5,
            "beta": 0.1,
            "use_bias_correction_kl": False,
            "top_entropy_quantile": 0.5,
        },
        {
            "options": {"clip_high": 0.3, "dual_clip": 1.5},
            "kl": {"coefficient": 0.1},
            "top_entropy": 0.5,
            "normaliser": "sequence",
        },
        mismatch=("token_mask", *BANDS),
    ),
]


def mismatch_of(correction: str | None, low: float | None, high: float | None) -> dict[str, Any]:
    if correction is None:
        return {"correction": "none"}
    bounds = {"high": high or 2.0} | ({"low": low or 0.0} if correction.endswith("mask") else {})
    return {"correction": correction, "options": bounds}


def recipe_of(make_recipe: Make, case: Case, bounds: tuple[str | None, float | None, float | None]) -> TrainRecipe:
    mismatch = mismatch_of(*bounds)
    loss = {"behaviour_kl": 0.0, **case.loss, "mismatch": mismatch}
    recipe = make_recipe(loss=loss, advantage=case.advantage, updates_per_batch=2)
    recipe.rollout.max_total_tokens = MAX_TOTAL_TOKENS
    return recipe


class Compared:
    """The loss of `chains` by TRL and by us, and their gradients with respect to log-probabilities and entropies."""

    def __init__(self, oracle: Any, chains: Chains, recipe: TrainRecipe, *bounds: Any) -> None:
        inputs = chains.logprobs["current"].requires_grad_(), chains.entropy.requires_grad_()
        theirs = oracle.loss(oracle.score(*bounds))
        self.theirs = torch.autograd.grad(theirs, inputs, allow_unused=True, retain_graph=True)
        ours = our_loss(chains, recipe)
        self.ours = torch.autograd.grad(ours, inputs, allow_unused=True)
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)

    def check_gradients(self) -> None:
        for mine, other in zip(self.ours, self.theirs, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradient_equal_trl(model_folder: Path, tmp_path: Path, make_recipe: Make, case: Case) -> None:
    chains, bounds = Chains.random(12), case.mismatch or (None, None, None)
    oracle = make_oracle(GrpoOracle, model_folder, tmp_path, chains, GROUP_SIZE, **case.trl)
    compared = Compared(oracle, chains, recipe_of(make_recipe, case, bounds), *bounds)
    # the case is effective: a bound or a mask stops some tokens, but not all
    stopped = chains.at_sampled(compared.theirs[0]) == 0
    assert 0 < stopped.sum() < sum(chains.lengths) or case.name in UNBOUNDED
    compared.check_gradients()


def test_the_pages_settings_equal_trls_defaults(model_folder: Path, tmp_path: Path, make_recipe: Make) -> None:
    """docs/coming-from.md has them."""
    page = (REPOSITORY / "docs" / "coming-from.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"TRL's defaults exactly.*?```yaml\n(.*?)```", page, re.DOTALL)
    chains, defaults = Chains.random(12), GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    assert defaults.vllm_importance_sampling_correction
    bounds = (defaults.vllm_importance_sampling_clip_min, defaults.vllm_importance_sampling_clip_max)
    recipe = make_recipe(**yaml.safe_load(block)["train"], updates_per_batch=2)
    oracle = make_oracle(GrpoOracle, model_folder, tmp_path, chains, GROUP_SIZE)
    compared = Compared(oracle, chains, recipe, defaults.vllm_importance_sampling_mode, *bounds)
    assert compared.theirs[0].abs().max() > 1e-3
    compared.check_gradients()


CORRECTIONS: dict[str, tuple[float | None, float | None]] = {
    "token_truncate": (None, 1.25),
    "token_mask": BANDS,
    "sequence_truncate": (None, 1.25),
    "sequence_mask": BANDS,
}
POLICIES = {case.loss.get("policy", "clip"): case for case in CASES if case.name in ("dapo", "gspo")}


@pytest.mark.parametrize(
    ("policy", "correction"), [*(("clip", correction) for correction in CORRECTIONS), ("gspo", "token_truncate")]
)
def test_with_corrections(model_folder: Path, tmp_path: Path, make_recipe: Make, policy: str, correction: str) -> None:
    """Value and gradient are TRL's, except for gspo with a correction by token. Each token's weight then is part of its
    own advantage (GSPO, equations 13 and 14), where TRL gives each token of a row the gradient of their mean: the
    values, and the gradients' sums over a row, are still the same."""
    chains, case, bounds = Chains.random(12), POLICIES[policy], (correction, *CORRECTIONS[correction])
    oracle = make_oracle(GrpoOracle, model_folder, tmp_path, chains, GROUP_SIZE, **case.trl)
    compared = Compared(oracle, chains, recipe_of(make_recipe, case, bounds), *bounds)
    if policy != "gspo":
        compared.check_gradients()
        return
    (ours, _), (theirs, _) = compared.ours, compared.theirs
    assert not torch.allclose(ours, theirs, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.sum(1), theirs.sum(1), rtol=0, atol=1e-6)
    weight = (chains.logprobs["proximal"] - chains.logprobs["behaviour"]).exp().clamp(max=bounds[2])
    weight = weight * torch.nn.utils.rnn.pad_sequence([torch.tensor(mask) for mask in chains.masks], batch_first=True)
    share = weight / weight.sum(1, keepdim=True).clamp(min=1e-12)
    torch.testing.assert_close(ours, share * theirs.sum(1, keepdim=True), rtol=0, atol=1e-6)


def test_k2_has_the_gradient_of_trls_corrected_k3(model_folder: Path, tmp_path: Path, make_recipe: Make) -> None:
    """TRL multiplies k3 by the ratio, whose gradient also counts: on-policy, this is k2's gradient."""
    chains = Chains.random(12)
    current = chains.logprobs["current"] = chains.logprobs["proximal"].clone().requires_grad_()
    oracle = make_oracle(GrpoOracle, model_folder, tmp_path, chains, GROUP_SIZE, loss_type="dapo", beta=0.3)
    theirs = torch.autograd.grad(oracle.loss(oracle.score()), current)[0]
    case = Case("k2", {}, {"kl": {"coefficient": 0.3, "estimator": "k2"}})
    ours = torch.autograd.grad(our_loss(chains, recipe_of(make_recipe, case, (None, None, None))), current)[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def our_loss(chains: Chains, recipe: TrainRecipe) -> Tensor:
    trajectories = [_trajectory(chains, number) for number in range(len(chains.masks))]
    groups = [
        Group(str(start), {}, trajectories[start : start + GROUP_SIZE])
        for start in range(0, len(trajectories), GROUP_SIZE)
    ]
    credit = Credit(groups, recipe)
    rows = credit.rows
    for name, table in {"entropy": chains.entropy, "reference": chains.logprobs["reference"]}.items():
        for row, values in zip(rows, _by_chain(chains, table), strict=True):
            row.streams[name] = values.tolist()
    credited = credit.assign(rows)
    (batch,) = make_batches(credited.rows, "padded", 60, normaliser=credited.normaliser)
    assert len(batch.micro_batches) > 2
    learner = RecordedLearner(chains)
    update_policy(learner, batch, recipe)  # type: ignore[arg-type]
    return learner.losses[1]


class RecordedLearner:
    """A learner that returns the log-probabilities of `chains` instead of running a model: proximal in the first
    update, current in the second. It records the losses, and changes nothing."""

    has_critic = False

    def __init__(self, chains: Chains) -> None:
        self._logprobs = [_by_chain(chains, chains.logprobs[role]) for role in ("proximal", "current")]
        self._entropy = _by_chain(chains, chains.entropy)
        self.losses: list[Tensor] = []

    def update(self, batch: Batch, loss: Loss, value_loss: None) -> Update:
        """Add up the loss of all micro-batches, like Learner.update on one process."""
        logprobs = self._logprobs[len(self.losses)]
        made: list[Terms] = []
        for index, part in enumerate(batch.micro_batches):
            own = [torch.cat([values[row] for row in part.rows]) for values in (logprobs, self._entropy)]
            made.append(loss(index, part, *own))
        self.losses.append(torch.stack([terms.loss for terms in made]).sum() / batch.normaliser)
        return Update(self.losses[-1].item(), 0.0, {}, {})


def _by_chain(chains: Chains, table: Tensor) -> list[Tensor]:
    return list(chains.at_sampled(table).split(chains.lengths))


def _trajectory(chains: Chains, number: int) -> Trajectory:
    row = Row()
    row.append_context([3, 4])
    tokens = iter(zip(chains.token_ids[number], chains.logprobs["behaviour"][number].tolist(), strict=False))
    turns = 0
    for sampled, run in groupby(chains.masks[number]):
        ids, logprobs = zip(*[next(tokens) for _ in run], strict=True)
        if sampled:
            row.append_sampled(list(ids), list(logprobs), [Span("0", 0, len(ids))])
            turns += 1
        else:
            row.append_context(list(ids))
            row.logprobs[-len(ids) :] = [float("nan")] * len(ids)
    return Trajectory(str(number), [], [row], Outcome.COMPLETED, chains.rewards[number], turns=turns)


def test_updates_of_a_model_equal_trl(model_folder: Path, tmp_path: Path, make_recipe: Make) -> None:
    """Two updates on one batch, with each side's own code throughout: loss and gradient norm, before and after the
    optimiser changed the weights and some ratios were clipped."""
    rng = random.Random(1)
    rows = [make_row(rng, turns=3) for _ in range(6)]
    advantages = [rng.gauss(0.0, 1.0) for _ in rows]
    loss = {"options": {"clip_high": 0.3}, "mismatch": {"correction": "none"}}
    recipe = make_recipe(
        learning_rate=3e-2, updates_per_batch=2, max_grad_norm=1e9, token_budget=100, loss={"behaviour_kl": 0.0, **loss}
    )
    learner = Learner(recipe, on_cpu(), temperature=0.7)
    made = [training_row(row, advantage) for row, advantage in zip(rows, advantages, strict=True)]
    batch = learner.deal([row for row in made if row])
    assert len(batch.micro_batches) > 1
    ours = update_policy(learner, batch, recipe).updates
    assert 0 < ours[1].sums["clipped"] < batch.tokens

    settings = {"loss_type": "dapo", "epsilon_high": 0.3, "beta": 0.0, "temperature": 0.7}
    run = make_trainer(GRPOTrainer, model_folder, tmp_path, len(rows), 2, **settings)
    run.current_gradient_accumulation_steps = 1
    inputs = _trl_inputs(rows, advantages)
    with torch.no_grad():
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        kept = inputs["completion_ids"].size(1)
        inputs["old_per_token_logps"], _, _ = run._get_per_token_logps_and_entropies(run.model, ids, attention, kept)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=3e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for update in ours:
        theirs = run._compute_loss(run.model, inputs)
        theirs.backward()
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)
        assert update.loss == pytest.approx(theirs.item(), abs=1e-6)
        assert update.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()


def _trl_inputs(rows: list[Row], advantages: list[float]) -> dict[str, Any]:
    prompts = [row.token_ids[: row.mask.index(1)] for row in rows]
    completions = [row.token_ids[row.mask.index(1) :] for row in rows]
    masks = [row.mask[row.mask.index(1) :] for row in rows]
    left, right = max(map(len, prompts)), max(map(len, completions))
    return {
        "prompt_ids": torch.tensor([[0] * (left - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (left - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([c + [0] * (right - len(c)) for c in completions]),
        "completion_mask": torch.tensor([[1] * len(c) + [0] * (right - len(c)) for c in completions]),
        "tool_mask": torch.tensor([m + [0] * (right - len(m)) for m in masks]),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(float(sum(map(sum, masks)))),
    }

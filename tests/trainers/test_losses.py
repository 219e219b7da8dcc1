"""Losses by hand, by float64 autograd, and against TRL's own GRPOTrainer._compute_loss."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rollout.trajectory import Row
from trainers.batch import padded, scatter, training_row
from trainers.config import TrainRecipe
from trainers.grpo import ppo_updates
from trainers.learner import Learner
from trainers.losses import clipped_policy_loss, mismatch_kl, negative_log_likelihood


def test_clipping_by_hand() -> None:
    # ratios 1.5, 1.5, 0.5, 0.5, 1.1 with clip 0.2 / 0.3, advantages +2, -2, +2, -2, +1
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1], dtype=torch.float64)
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0], dtype=torch.float64)
    terms, clipped = clipped_policy_loss(ratio.log(), torch.zeros_like(ratio), advantage, 0.2, 0.3)
    assert terms.tolist() == pytest.approx([-2.6, 3.0, -1.0, 1.6, -1.1])
    assert clipped.tolist() == [True, False, False, True, False]


def test_gradients_are_those_of_the_formulas() -> None:
    torch.manual_seed(0)
    proximal = -3 * torch.rand(6, dtype=torch.float64)
    advantage = torch.randn(6, dtype=torch.float64)
    logprob = (proximal + 0.1 * torch.randn(6, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clipped_policy_loss(x, proximal, advantage, 0.2, 0.2)[0], logprob)
    assert torch.autograd.gradcheck(negative_log_likelihood, logprob)
    # on policy the gradient is that of REINFORCE: -advantage
    on_policy = proximal.clone().requires_grad_()
    clipped_policy_loss(on_policy, proximal, advantage, 0.2, 0.2)[0].sum().backward()
    assert torch.equal(on_policy.grad, -advantage)


def test_mismatch_kl_by_hand() -> None:
    given = mismatch_kl(torch.tensor([math.log(2.0), 0.0]), torch.tensor([0.0, 0.0]))
    assert given.tolist() == pytest.approx([2 - 1 - math.log(2.0), 0.0])


@pytest.fixture
def trl_trainer(model_folder: Path, tmp_path: Path) -> GRPOTrainer:
    """TRL's trainer on the same weights, with the loss that is a mean over all tokens of the batch."""
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.3,
        beta=0.0,
        temperature=0.7,
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        report_to=[],
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w3 w4"}] * 2),
    )


def test_equals_trl_loss_and_gradient(
    trl_trainer: GRPOTrainer,
    make_recipe: Callable[..., TrainRecipe],
    make_row: Callable[..., Row],
    accelerator: Accelerator,
) -> None:
    """Two epochs on one batch, so that ratios move away from 1 and some are clipped."""
    rng = random.Random(1)
    rows = [make_row(rng, turns=3) for _ in range(6)]
    advantages = [rng.gauss(0.0, 1.0) for _ in rows]
    recipe = make_recipe(learning_rate=3e-2, clip_low=0.2, clip_high=0.3, updates_per_batch=2, max_grad_norm=1e9)
    learner = Learner(recipe, accelerator, temperature=0.7)
    made = [training_row(row, advantage) for row, advantage in zip(rows, advantages, strict=True)]
    batch = scatter(padded([row for row in made if row], token_budget=100), accelerator)
    assert len(batch.micro_batches) > 1
    updates = ppo_updates(learner, batch, recipe)
    assert 0 < updates[1].sums["clipped"] < batch.tokens

    inputs = _trl_inputs(rows, advantages)
    optimizer = torch.optim.AdamW(trl_trainer.model.parameters(), lr=3e-2, betas=(0.9, 0.95), weight_decay=0.0)
    trl_trainer.current_gradient_accumulation_steps = 1
    trl_trainer.model.eval()
    trl_trainer.model.training = True
    with torch.no_grad():
        kept = inputs["completion_ids"].size(1)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        model = trl_trainer.model
        old, _, _ = trl_trainer._get_per_token_logps_and_entropies(model, ids, attention, kept)
    inputs["old_per_token_logps"] = old
    for ours in updates:
        loss = trl_trainer._compute_loss(trl_trainer.model, inputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trl_trainer.model.parameters(), 1e9)
        assert ours.loss == pytest.approx(loss.item(), abs=1e-6)
        assert ours.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()


def _trl_inputs(rows: list[Row], advantages: list[float]) -> dict[str, Any]:
    """Rows in TRL's layout: prompts padded on the left, completions on the right, tool tokens masked."""
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

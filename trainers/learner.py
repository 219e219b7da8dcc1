"""The learner: policy, optimiser and schedule on accelerate, and one optimiser update from micro-batches."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor

from trainers.batch import Batch, MicroBatch
from trainers.config import TrainRecipe
from trainers.optimizer import make_optimizer, make_schedule
from trainers.policy import Policy, load_policy


@dataclass
class Terms:
    """What a loss makes of one micro-batch: the sum of weight x term over its tokens, and figures to report."""

    loss: Float[Tensor, ""]
    sums: dict[str, Float[Tensor, ""]] = field(default_factory=dict)
    """Added up over micro-batches and processes."""
    maxima: dict[str, Float[Tensor, ""]] = field(default_factory=dict)
    """The largest over micro-batches and processes is kept."""


Loss = Callable[[int, MicroBatch, Float[Tensor, "targets"], Float[Tensor, "targets"]], Terms]
"""(index of the micro-batch, micro-batch, log-probabilities, entropies) -> Terms."""


@dataclass(frozen=True)
class Update:
    """What one optimiser update reports, over all processes."""

    loss: float
    grad_norm: float
    """Before clipping."""
    sums: dict[str, float]
    maxima: dict[str, float]


class Learner:
    """Everything that an optimiser update needs; the same for every algorithm."""

    def __init__(self, recipe: TrainRecipe, accelerator: Accelerator, temperature: float = 1.0) -> None:
        self.accelerator = accelerator
        self.temperature = temperature
        self.max_grad_norm = recipe.train.max_grad_norm
        policy = load_policy(recipe.model, recipe.seed, accelerator.device)
        optimizer = make_optimizer(policy, recipe.train)
        self._wrapped, self._optimizer = accelerator.prepare(policy, optimizer)
        # not prepared: accelerate would step it once per process
        self._schedule = make_schedule(optimizer, recipe.train)
        self.policy: Policy = accelerator.unwrap_model(self._wrapped)
        torch.manual_seed(recipe.seed)

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return float(self._schedule.get_last_lr()[0])

    def update(self, batch: Batch, loss: Loss) -> Update:
        """One optimiser update on a batch. Every process calls it, with its own share.

        Raises FloatingPointError, and changes no weight, where the gradient is not finite.
        """
        # DDP and FSDP2 average gradients over processes; the normaliser is global, so undo that
        scale = self.accelerator.num_processes / batch.normaliser
        terms: list[Terms] = []
        for index, part in enumerate(batch.micro_batches):
            last = index == len(batch.micro_batches) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self._wrapped):
                logprob, entropy = self._wrapped(part.ids, part.sources, part.labels, temperature=self.temperature)
                terms.append(loss(index, part, logprob, entropy))
                self.accelerator.backward(terms[-1].loss * scale)
        grad_norm = float(self.accelerator.clip_grad_norm_(self._wrapped.parameters(), self.max_grad_norm))
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient norm is {grad_norm}: no update was made; lower train.learning_rate, or look for values "
                "that are not finite in the batch"
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._report(terms, batch.normaliser, grad_norm)

    def end_step(self) -> None:
        """The schedule counts steps: call once per step, after its updates."""
        self._schedule.step()

    def _report(self, terms: list[Terms], normaliser: float, grad_norm: float) -> Update:
        sums = ["loss", *terms[0].sums]
        maxima = list(terms[0].maxima)
        own = [torch.stack([t.loss.detach(), *t.sums.values(), *t.maxima.values()]).float() for t in terms]
        # one row per micro-batch and process, one column per figure: a single collective call
        table = self.accelerator.gather(torch.stack(own)).cpu()
        total = dict(zip(sums, table[:, : len(sums)].double().sum(0).tolist(), strict=True))
        peak = table[:, len(sums) :].max(0).values.tolist() if maxima else []
        return Update(total.pop("loss") / normaliser, grad_norm, total, dict(zip(maxima, peak, strict=True)))

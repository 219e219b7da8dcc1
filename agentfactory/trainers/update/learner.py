"""The learner: policy, optimiser and schedule on accelerate. It scores rows and performs optimiser updates."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from agentfactory.base.errors import SettingError
from agentfactory.base.processes.memory import keep_freed_memory, return_freed_memory
from agentfactory.base.run_notices import counted, doing
from agentfactory.rollout.images.families import load_vision
from agentfactory.rollout.inference.sequence_lengths import position_limit
from agentfactory.rollout.token_row import Row
from agentfactory.trainers.batches.batch import Batch, MicroBatch, TrainingRow, deal_batch, make_plans
from agentfactory.trainers.batches.image_batches import ImageLoader, Images
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.critic import ActorCritic, Role, make_actor_critic
from agentfactory.trainers.networks.fp8 import gather_in_fp8
from agentfactory.trainers.networks.layers import weights_kept
from agentfactory.trainers.networks.lora import Needs
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.networks.vision_tower import check_images, sees, tower_is_trained
from agentfactory.trainers.processes.accelerator import PATIENCE, decided_by_rank_0, weights_of_rank_0
from agentfactory.trainers.teachers.teacher import (
    make_reference,
    make_teacher,
    teachers_rows,
    top_k_measure,
    with_scores,
    without_long,
)
from agentfactory.trainers.update.optimizer import clip_gradients, make_optimizer, make_schedule

KEEPS_MEMORY = 2**27
"""Number of parameters below which a trainer on a CPU reuses freed memory itself: a small network spends a third of its
time on page faults, while one of 500 million needs half as much memory again to save a seventh."""

Targets = Float[Tensor, "targets *several"]


@dataclass
class Terms:
    """A loss's result for one micro-batch: the sum of weight x term over its tokens, and metrics to report."""

    loss: Float[Tensor, ""]
    sums: dict[str, Float[Tensor, ""]] = field(default_factory=dict)
    """Metrics that are added up over micro-batches and processes."""
    maxima: dict[str, Float[Tensor, ""]] = field(default_factory=dict)
    """Metrics whose maximum over micro-batches and processes is kept."""


Loss = Callable[..., Terms]
"""(index of the micro-batch, micro-batch, log-probabilities, entropies[, divergence from a teacher]) -> Terms."""

ValueLoss = Callable[[MicroBatch, Targets], Terms]
"""(micro-batch, the critic's values) -> Terms."""


@dataclass(frozen=True)
class Update:
    """The report of one optimiser update, over all processes."""

    loss: float
    grad_norm: float
    """The norm before clipping."""
    sums: dict[str, float]
    maxima: dict[str, float]


class Learner:
    """The trained networks and their optimiser, updated in the same way for every algorithm."""

    def __init__(
        self,
        recipe: TrainRecipe,
        accelerator: Accelerator,
        temperature: float = 1.0,
        images: Path | None = None,
        needs: Needs = None,
    ) -> None:
        """`images` is the folder of the rows' images (ImageStore), and `needs` are the tokens that the run needs."""
        train = recipe.train
        self.accelerator = accelerator
        self.temperature = temperature
        # NCCL would take rows through the GPUs
        on_gpus = accelerator.num_processes > 1 and dist.get_backend() != "gloo"
        self._gloo = dist.new_group(backend="gloo", timeout=PATIENCE) if on_gpus else None
        self.max_grad_norm = train.max_grad_norm
        self.token_budget = train.token_budget
        self.entropy_gradient = train.loss.entropy_bonus > 0
        with doing(f"the trainer loads {recipe.model.path}"):
            self.policy: Policy = load_policy(recipe, accelerator.device, needs)
        self.batching = self.policy.batching
        small = accelerator.device.type == "cpu" and self.policy.network.num_parameters() < KEEPS_MEMORY
        (keep_freed_memory if small else return_freed_memory)()
        self._limit = position_limit(self.policy.network.config.to_dict())
        self._rows_from = "train.from_trajectories" if train.from_trajectories else "data"
        self.vision = load_vision(recipe.model.path) if sees(self.policy.network.config) else None
        self.images = ImageLoader(recipe.model.path, self.vision, images) if self.vision else None
        if self.vision is not None:
            check = partial(check_images, self.policy, recipe.model.path)
            # only rank 0 has weights under fsdp2
            decided_by_rank_0(check) if train.is_sharded else check()
        model = make_actor_critic(recipe, self.policy, accelerator.device) if train.has_critic else self.policy
        optimizer = make_optimizer(model, train)
        with weights_of_rank_0(model) if accelerator.is_fsdp2 else contextlib.nullcontext():
            self.model, self.optimizer = accelerator.prepare(model, optimizer)
        if accelerator.is_fsdp2 and train.precision != "auto":
            gather_in_fp8(self.model)
        # stepped once per step, after its updates; not prepared: accelerate would step it once per process
        self.schedule = make_schedule(optimizer, train)
        unwrapped = accelerator.unwrap_model(self.model)
        self._actor_critic = unwrapped if isinstance(unwrapped, ActorCritic) else None
        self.policy = self._actor_critic.policy if self._actor_critic else unwrapped
        self._reference = make_reference(recipe, self.policy, accelerator) if train.has_reference else None
        self._grading = recipe.teacher
        # the rollout worker asks a teacher behind a server
        loads = recipe.teacher is not None and recipe.teacher.url is None
        self._teacher = make_teacher(recipe, self.policy, accelerator) if loads else None
        torch.manual_seed(recipe.seed)

    @property
    def has_critic(self) -> bool:
        return self._actor_critic is not None

    @property
    def networks(self) -> list[nn.Module]:
        """The trained networks, and those of reference and teacher that are separate."""
        frozen = [scorer.network for scorer in (self._reference, self._teacher) if scorer is not None]
        return [self.model, *(network for network in frozen if network is not None)]

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def deal(self, rows: list[TrainingRow], normaliser: float | None = None) -> Batch:
        """Return this process's share of rank 0's `rows`; every process calls it. `normaliser`: see make_batches."""
        processes, plans, sees = self.accelerator.num_processes, None, self.vision is not None
        if self.accelerator.is_main_process:
            self.check_lengths(rows)
            plans = make_plans(rows, self.batching, self.token_budget, processes, normaliser, sees)
        return deal_batch(plans, rows, self.vision, self.accelerator.device, self._gloo)

    def check_lengths(self, rows: Iterable[Row | TrainingRow]) -> None:
        """Raise SettingError if a row is too long for the network's positions."""
        longest = max((len(row.token_ids) for row in rows), default=0)
        if self._limit is not None and longest > self._limit.length:
            problem, fix = f"a row has {longest} tokens: {self._limit.reason}", "leave out longer rows"
            raise SettingError(self._rows_from, problem, fix)

    @torch.no_grad()
    def score(self, rows: list[TrainingRow], names: Collection[str]) -> list[TrainingRow]:
        """Return rank 0's `rows` with further streams from the current weights: `proximal` (log-probabilities) and
        `entropy`, `reference`, `teacher` or `teacher_top` (see TeacherConfig.stream), `value`. Every process calls it,
        with the same `names`; only rank 0 gets rows back."""
        grading = self._grading
        in_context = None if grading is None or grading.context is None else grading.stream
        own = [name for name in names if name != in_context]
        if own:
            rows = self._score(rows, own)
        if grading is not None and in_context is not None and in_context in names:
            assert self._teacher is not None
            rows = without_long(rows, min(self.token_budget, self._teacher.longest(self.policy) or self.token_budget))
            rows = with_scores(rows, self._score(teachers_rows(rows), [in_context]), in_context, grading.top_k)
        return rows

    def _score(self, rows: list[TrainingRow], names: Collection[str]) -> list[TrainingRow]:
        batch, made = self.deal(rows), []
        frozen: dict[str, Any] = {}
        if self._reference is not None:
            frozen["reference"] = self._reference.logprobs
        if self._teacher is not None:
            frozen |= {"teacher": self._teacher.logprobs, "teacher_top": self._teacher.top}
        with weights_kept(self.model, self.policy.dtype):
            for part in counted("scoring", "micro-batches", batch.micro_batches):
                streams: dict[str, Targets] = {}
                if "proximal" in names or "entropy" in names:
                    found = self.policy_forward(*self._inputs(part), self.temperature, self.entropy_gradient)
                    streams["proximal"], streams["entropy"] = found
                for name in [name for name in frozen if name in names]:
                    streams[name] = frozen[name](self.model, *self._inputs(part), self.temperature)
                if "value" in names:
                    streams["value"] = self.model(Role.CRITIC, *self._inputs(part))
                made.append({name: streams[name] for name in names})
        scores = self.by_row(batch, made)
        return [replace(row, streams=row.streams | scores[index]) for index, row in enumerate(rows)]

    def by_row(self, batch: Batch, streams: Sequence[dict[str, Targets]]) -> dict[int, dict[str, np.ndarray]]:
        """Collect per-target values of all processes' micro-batches by their row's index; only rank 0 gets them."""
        found: list[tuple[int, dict[str, np.ndarray]]] = []
        for part, own in zip(batch.micro_batches, streams, strict=True):
            counts = torch.bincount(part.sequence, minlength=len(part.rows)).tolist()
            split = {name: values.float().cpu().split(counts) for name, values in own.items()}
            for place, row in enumerate(part.rows):
                found.append((row, {name: values[place].numpy() for name, values in split.items()}))
        if self.accelerator.num_processes > 1:
            gathered: list[list[tuple[int, dict[str, np.ndarray]]] | None] = [None] * self.accelerator.num_processes
            dist.gather_object(found, gathered if self.accelerator.is_main_process else None)
            found = [entry for share in gathered for entry in share or []]
        return dict(found)

    def update(self, batch: Batch, loss: Loss | None, value_loss: ValueLoss | None = None) -> Update:
        """Perform one optimiser update on a batch. Every process calls it, with its own share. Without `loss` only the
        critic learns. Raises FloatingPointError, and changes no weight, if the gradient is not finite."""
        terms = self.forward_backward(batch, loss, value_loss)
        grad_norm = self._clip(Role.POLICY)
        if self.has_critic:
            # separately: a critic far from its returns would shrink the policy's step to nothing
            self._clip(Role.CRITIC)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._report(terms, batch.normaliser, grad_norm)

    def forward_backward(self, batch: Batch, loss: Loss | None, value_loss: ValueLoss | None = None) -> list[Terms]:
        """Return the terms of each micro-batch, and add their gradients to those that are there; not in no_grad()."""
        # DDP and FSDP2 average gradients over processes; the normaliser is global, so undo that
        scale = self.accelerator.num_processes / batch.normaliser
        compute: dict[Role, Callable[[int, MicroBatch], Terms]] = {}
        if loss is not None:
            compute[Role.POLICY] = lambda index, part: loss(index, part, *self._graded_pass(part))
        if value_loss is not None:
            compute[Role.CRITIC] = lambda _, part: value_loss(part, self.model(Role.CRITIC, *self._inputs(part)))
        made: dict[Role, list[Terms]] = {role: [] for role in compute}
        # role by role: under hsdp, what a machine adds up before it is reduced must be of the same weights each time
        passes = [(role, index) for role in made for index in range(len(batch.micro_batches))]
        with weights_kept(self.model, self.policy.dtype):
            for role, index in counted("updating", "passes", passes):
                part = batch.micro_batches[index]
                with self._syncing(index == len(batch.micro_batches) - 1):
                    terms = compute[role](index, part)
                    if torch.is_grad_enabled():
                        self.accelerator.backward(terms.loss * scale)
                    # a graph holds the kept weights
                    terms.loss = terms.loss.detach()
                made[role].append(terms)
        # the first loss is reported; the metrics of all are kept
        first, *others = made.values()
        for other in others:
            for mine, theirs in zip(first, other, strict=True):
                mine.sums |= theirs.sums
        return first

    def _inputs(self, part: MicroBatch) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Images | None]:
        images, loader, device = None, self.images, self.accelerator.device
        if loader is not None and part.images:
            images = loader.load(part.images, part.rotary, device)
        elif loader is not None and self.accelerator.num_processes > 1:
            # collective calls must match: fsdp2's for the weights of each layer, ddp's for the gradients of all
            together = part.in_step_with_images or tower_is_trained(self.policy.network)
            images = loader.blank(device) if together else None
        return part.ids, part.sources, part.labels, part.positions, part.ends, images

    def policy_forward(self, *inputs: Any) -> tuple[Targets, ...]:
        """Run the policy's forward pass through the model that accelerate prepared; see Policy.forward."""
        return self.model(Role.POLICY, *inputs) if self.has_critic else self.model(*inputs)

    def _graded_pass(self, part: MicroBatch) -> tuple[Targets, ...]:
        inputs, measure = self._inputs(part), None
        if self._grading is not None and self._grading.top_k is not None:
            measure = top_k_measure(self._grading, part.streams["teacher_top"])
        elif self._grading is not None and not self._grading.is_sampled:
            assert self._teacher is not None
            measure = self._teacher.measure(self.model, self.temperature, *inputs)
        return self.policy_forward(*inputs, self.temperature, self.entropy_gradient, measure)

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of the teacher's forward passes since the last call, by metric name."""
        return {"seconds/teacher": self._teacher.take_seconds()} if self._teacher is not None else {}

    def _clip(self, role: Role) -> float:
        parameters = self._actor_critic.parameters_of(role) if self._actor_critic else self.model.parameters()
        return clip_gradients(self.accelerator, parameters, self.max_grad_norm, whose=role)

    def _syncing(self, sync: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for a backward pass, the last of its role if `sync`: gradients are reduced between the
        processes of ddp and the machines of hsdp in the last one only. Within fsdp2's shards they are in each: until
        then, every process would keep whole gradients of all weights."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_all_reduce(sync)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if sync else self.accelerator.no_sync(self.model)

    def _report(self, terms: list[Terms], normaliser: float, grad_norm: float) -> Update:
        sums = ["loss", *terms[0].sums]
        maxima = list(terms[0].maxima)
        own = [torch.stack([t.loss.detach(), *t.sums.values(), *t.maxima.values()]).float() for t in terms]
        # one row per micro-batch and process, one column per metric: a single collective call
        table = self.accelerator.gather(torch.stack(own)).cpu()
        total = dict(zip(sums, table[:, : len(sums)].double().sum(0).tolist(), strict=True))
        peak = table[:, len(sums) :].max(0).values.tolist() if maxima else []
        return Update(total.pop("loss") / normaliser, grad_norm, total, dict(zip(maxima, peak, strict=True)))

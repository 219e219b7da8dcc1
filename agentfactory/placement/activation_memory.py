"""Memory that a micro-batch and an optimizer step take in addition to weights and gradients, measured by running the
policy's own code on fake tensors, which have shapes but no data, and counting live bytes after each operation."""

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig

from agentfactory.placement.meta_model import meta_model, policy_of
from agentfactory.trainers.batches.batch import Batching, MicroBatch, TrainingRow, make_batches
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.critic import ActorCritic, Role
from agentfactory.trainers.networks.layers import weights_kept
from agentfactory.trainers.networks.lora import table_of
from agentfactory.trainers.networks.network import Backbone, body_of, decoder_layers
from agentfactory.trainers.networks.policy import Measure, Policy
from agentfactory.trainers.teachers.teacher import divergence, top_k_measure
from agentfactory.trainers.update.offload import tensors_in
from agentfactory.trainers.update.optimizer import make_optimizer


@dataclass(frozen=True)
class Peak:
    rest: float = 0.0
    logits: float = 0.0
    """Bytes of tensors with one column per token of the vocabulary."""

    @property
    def total(self) -> float:
        return self.rest + self.logits

    def plus(self, times: int, more: "Peak", less: "Peak") -> "Peak":
        logits = self.logits + times * (more.logits - less.logits)
        return Peak(self.rest + times * (more.rest - less.rest), logits)


class LiveBytes(TorchDispatchMode):
    """A mode that counts the live storages that operations within it create, and keeps the peak per `phase`."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.phase = "start"
        self.peaks: dict[str, Peak] = {}
        self.alive = [0, 0]
        self._vocabulary = vocabulary
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            # only reads a tensor's device
            return func(*args, **kwargs)
        for tensor in tensors_in([*args, *kwargs.values()]):
            # unknown tensors existed before, and are not counted
            self._meet(tensor, counted=False)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            # a product of experts: the kernels accept float32, but torch's shape functions for them do not
            out = func(*(a.bfloat16() if a.is_floating_point() else a for a in args), **kwargs).float()
        else:
            out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            self._meet(tensor, counted=True)
        return out

    def _meet(self, tensor: Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = storage.nbytes() if counted else 0
        kind = int(tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary)
        self._sizes[key] = size
        weakref.finalize(storage, self._forget, key, kind)
        self.alive[kind] += size
        if sum(self.alive) > self.peaks.get(self.phase, Peak()).total:
            self.peaks[self.phase] = Peak(*self.alive)

    def _forget(self, key: int, kind: int) -> None:
        self.alive[kind] -= self._sizes.pop(key)

    def leave_out(self, tensor: Tensor) -> None:
        """Stop counting `tensor`, which moves to other memory."""
        key = tensor.untyped_storage()._cdata
        self.alive[0] -= self._sizes[key]
        self._sizes[key] = 0


class KnownValues(TorchFunctionMode):
    """A mode that provides `numpy()` for fake tensors with known values: attention masks decide on operations."""

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakTensorKeyDictionary()

    def add(self, tensor: Tensor, values: np.ndarray) -> None:
        self._values[tensor] = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.cpu, Tensor.numpy) and args[0] in self._values:
            values = self._values[args[0]]
            if func is Tensor.numpy:
                return values
            out = func(*args, **(kwargs or {}))
            self.add(out, values[args[1]] if func is Tensor.__getitem__ else values)
            return out
        return func(*args, **(kwargs or {}))


def trace(recipe: TrainRecipe, config: PreTrainedConfig, device: str) -> tuple[Peak, float]:
    """Return the peak of a micro-batch of `train.token_budget` tokens, and the bytes that an optimizer step adds,
    without weights, gradients and the optimizer's state. Each phase's peak grows linearly with the layers of a kind, so
    run a network with one layer of each kind, and for each kind one with a second layer of that kind below it."""
    text = config.get_text_config()
    kinds = list(zip(*_per_layer(text).values(), strict=True)) or [()] * text.num_hidden_layers
    # the last layer of each kind: backward passes begin and peak there
    some = sorted(len(kinds) - 1 - kinds[::-1].index(kind) for kind in set(kinds))
    peaks = base = _trace(recipe, _only(config, some), device)
    for kind in set(kinds):
        if others := kinds.count(kind) - 1:
            more = _trace(recipe, _only(config, [kinds.index(kind), *some]), device)
            peaks = {phase: peaks[phase].plus(others, more[phase], base[phase]) for phase in peaks}
    step = peaks.pop(_STEP)
    return max(peaks.values(), key=lambda peak: peak.total), step.total


def _per_layer(text: PreTrainedConfig) -> dict[str, list[Any]]:
    layers = text.num_hidden_layers
    return {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == layers}


def _only(config: PreTrainedConfig, layers: list[int]) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in _per_layer(text).items():
        setattr(text, name, [value[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    return config


_STEP = "step"


def _trace(recipe: TrainRecipe, config: PreTrainedConfig, device: str) -> dict[str, Peak]:
    """Return the peak of each phase of a micro-batch, and of the optimizer's step."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode() as fake:
        with unset_fake_temporarily():
            model = meta_model(recipe, config)
            policy = policy_of(model)
            part = fullest(recipe, policy.batching)
        _materialise(model, recipe)
        values = KnownValues()
        made: dict[str, Any] = {}
        for name in ("ids", "positions", "ends", "sources", "labels"):
            if (tensor := getattr(part, name)) is not None:
                made[name] = fake.from_tensor(tensor)
                with unset_fake_temporarily():
                    values.add(made[name], tensor.numpy())
        part = replace(part, **made)
        inputs = (part.ids, part.sources, part.labels, part.positions, part.ends, None)
        live = LiveBytes(config.get_text_config().vocab_size)
        if recipe.train.gradient_checkpointing == "offload" and device == "cuda":
            for layer in decoder_layers(policy.network):
                layer.register_forward_hook(lambda layer, args, output: live.leave_out(args[0]))
        with live, values, weights_kept(model, policy.dtype):
            measure = _measure(recipe, policy, part)
            options = (recipe.rollout.temperature, recipe.train.loss.entropy_bonus > 0, measure)
            with _phases(live, Role.POLICY, policy):
                role = (Role.POLICY,) if isinstance(model, ActorCritic) else ()
                found = model(*role, *inputs, *options)
                loss: Any = sum(value.sum() for value in found)
                live.phase = f"{Role.POLICY} head backward"
                loss.backward()
            del found, measure
            if isinstance(model, ActorCritic):
                with _phases(live, Role.CRITIC, model.critic.backbone or policy):
                    loss = model(Role.CRITIC, *inputs).sum()
                    live.phase = f"{Role.CRITIC} head backward"
                    loss.backward()
        return live.peaks | {_STEP: _step(model, recipe)}


def _measure(recipe: TrainRecipe, policy: Policy, part: MicroBatch) -> Measure | None:
    """Return the measure of a teacher.divergence, with the policy's own head for the teacher's."""
    teacher = recipe.teacher
    if teacher is None or teacher.is_sampled:
        return None
    if teacher.top_k is not None:
        return top_k_measure(teacher, torch.zeros(len(part.labels), 2, teacher.top_k))
    width = table_of(policy.network.get_output_embeddings()).shape[1]
    hidden = torch.empty(len(part.labels), width, dtype=policy.dtype)

    def measured(logits: Tensor, chunk: slice) -> Tensor:
        with torch.no_grad():
            theirs = policy.logits(hidden[chunk])
        return divergence(teacher.divergence, logits, theirs)  # type: ignore[arg-type]

    return measured


def used_dtype(weight: Tensor, recipe: TrainRecipe) -> torch.dtype:
    """Return the dtype of a weight in forward and backward passes; fsdp2 gathers it in the model's dtype."""
    return getattr(torch, recipe.model.dtype) if recipe.train.is_sharded else weight.dtype


def _materialise(model: nn.Module, recipe: TrainRecipe) -> None:
    """Give a model on the meta device fake tensors on the CPU, and gradients for its trained weights."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and id(weight) not in made:
                # tied weights stay tied
                fake = nn.Parameter(torch.empty(weight.shape, dtype=used_dtype(weight, recipe)), weight.requires_grad)
                fake.grad = torch.empty_like(fake) if weight.requires_grad else None
                made[id(weight)] = fake
            module._parameters[name] = made.get(id(weight))
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)


def _step(model: nn.Module, recipe: TrainRecipe) -> Peak:
    if recipe.train.optimizer.name not in ("adafactor", "muon"):
        # one fused kernel, or operations in place
        return Peak()
    optimizer = make_optimizer(model, recipe.train)
    # the first step creates the state
    optimizer.step()
    with LiveBytes(0) as live:
        optimizer.step()
    return live.peaks["start"]


@contextmanager
def _phases(live: LiveBytes, role: Role, backbone: Backbone) -> Iterator[None]:
    """Set the phase of `live` to the running part of a pass; the parts' peaks grow differently with the layers."""

    def enter(phase: str, *args: Any) -> None:
        live.phase = f"{role} {phase}"

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        enter("head")
        output.last_hidden_state.register_hook(partial(enter, "layers backward"))

    def embedded(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(enter, "embedding backward"))
        else:
            # otherwise the first layer would need less than those above it, and extrapolation over layers would fail
            output.requires_grad_()

    body, embedding = body_of(backbone.network), backbone.network.get_input_embeddings()
    handles = [body.register_forward_pre_hook(partial(enter, "layers")), body.register_forward_hook(leave)]
    handles.append(embedding.register_forward_hook(embedded))
    yield
    for handle in handles:
        handle.remove()


def fullest(recipe: TrainRecipe, batching: Batching) -> MicroBatch:
    """Return a micro-batch as large as `train.token_budget` allows: rows of maximum length, all of whose tokens are
    trained; in trees, groups that share the first half of their rows and train the second."""
    budget = recipe.train.token_budget
    # a row's last token is predicted, and predicts nothing
    length = recipe.rollout.max_total_tokens - 1
    if batching != "tree":
        rows = [_row(number, 0, length) for number in range(max(1, budget // length))]
    else:
        shared = length // 2
        rows, room, tree = [], budget, 0
        while not rows or room >= length:
            chains = min(recipe.largest_group, max(1, (room - shared) // (length - shared)))
            rows += [_row(tree, shared, length, chain) for chain in range(chains)]
            room -= shared + chains * (length - shared)
            tree += 1
    batch = make_batches(rows, batching, budget)[0]
    return max(batch.micro_batches, key=lambda part: part.ids.numel())


def _row(tree: int, shared: int, length: int, chain: int = 0) -> TrainingRow:
    """Return a row that shares only its beginning with the other rows of its tree."""
    targets = np.arange(max(1, shared), length + 1)
    return TrainingRow(
        token_ids=np.repeat([2 * tree, 2 * chain + 1], [shared, length + 1 - shared]),
        targets=targets,
        streams={name: np.ones(len(targets)) for name in ("behaviour", "advantage", "weight", "mixed")},
    )

"""Models in training: each is an adapter of the Learner's network, with an optimizer and pending gradients of its own.

Everything here computes, and runs on one thread, one request at a time."""

import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentfactory.rollout.inference.adapter_config import WEIGHTS
from agentfactory.tinker.bodies import Adam, Lora
from agentfactory.tinker.losses import LOSSES, REFUSED, Loss, named
from agentfactory.tinker.messages import Datum, PassRequest, RequestError, pass_result
from agentfactory.trainers.batches.batch import MicroBatch, TrainingRow
from agentfactory.trainers.networks import lora
from agentfactory.trainers.sync.canary import Canary
from agentfactory.trainers.sync.canary_verdict import Scores
from agentfactory.trainers.update.learner import Learner, Targets, Terms
from agentfactory.trainers.update.optimizer import clip_gradients

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)

ALPHA = 32
"""The adapters' outputs are scaled by alpha / rank; the API has no field for it, and its authors write 32."""
OPTIMIZER = "optimizer.safetensors"
_LARGEST_ID = 1 << 24
"""Labels travel as float32, which is exact below."""


class Model:
    """A model in training; `fault` is the reason why its pending gradients are incomplete."""

    def __init__(self, adapter: str, config: Lora, weights: dict[str, nn.Parameter]) -> None:
        self.adapter, self.config, self.weights = adapter, config, weights
        self.optimizer = torch.optim.AdamW(weights.values(), fused=True)
        self.fault: str | None = None
        self.steps = 0


class Trainer:
    """The models on one base, by a Learner, whose own adapter stays untrained."""

    def __init__(self, learner: Learner, canary: Canary, largest_rank: int) -> None:
        self._learner = learner
        self._policy = learner.policy
        self._peft: PeftModel = learner.policy.model  # type: ignore[assignment]
        self._canary = canary
        self._largest_rank = largest_rank
        self._modules = _modules(learner.policy.network)
        self._vocabulary = lora.table_of(learner.policy.network.get_output_embeddings()).shape[0]

    def create(self, name: str, config: Lora) -> Model:
        """Add a model: an adapter named `name`, determined by the seed. Raises RequestError."""
        from peft import LoraConfig

        if config.rank > self._largest_rank:
            problem = f"lora_config.rank: got {config.rank}, and this service takes {self._largest_rank} at most"
            raise RequestError(f"{problem}; lower it, or start the service with model.lora.rank={config.rank}")
        modules = [name for part, names in self._modules.items() if getattr(config, part) for name in names]
        if not modules:
            raise RequestError("lora_config: train_attn, train_mlp and train_unembed leave no module; set one of them")
        adapter = LoraConfig(r=config.rank, lora_alpha=ALPHA, target_modules=modules, task_type="CAUSAL_LM")
        torch.manual_seed(random.randrange(2**31) if config.seed is None else config.seed % 2**63)
        self._peft.add_adapter(name, adapter)
        # peft freezes all adapters but the one in use
        for key, weight in self._peft.named_parameters():
            if "lora_" in key:
                weight.requires_grad_(True)
        return Model(name, config, lora.trained_weights(self._peft, name))

    def drop(self, model: Model) -> None:
        self._peft.delete_adapter(model.adapter)

    # ---- passes and steps

    def run_pass(self, model: Model, request: PassRequest) -> bytes:
        """Carry out a pass; its gradients add up until `step`. Raises RequestError."""
        try:
            return self._run_pass(model, request)
        except Exception as error:
            if not request.forward_only:
                model.fault = model.fault or str(error)
            raise

    def _run_pass(self, model: Model, request: PassRequest) -> bytes:
        loss, options = _loss_of(request)
        data = request.data()
        several = max((datum.inputs["target_tokens"].shape[1:] for datum in data if _has_targets(datum)), default=())
        rows = [self._row(number, datum, loss, several) for number, datum in enumerate(data)]
        found: list[dict[str, Targets]] = []

        def terms(index: int, part: MicroBatch, logprob: Targets, entropy: Targets) -> Terms:
            found.append({"logprobs": logprob.detach()})
            return Terms(loss.terms(logprob, part.streams, part.sequence, **options).sum())

        with self._policy.scoring_with(model.adapter), torch.set_grad_enabled(not request.forward_only):
            batch = self._learner.deal(rows, normaliser=1.0)
            total = sum(float(part.loss) for part in self._learner.forward_backward(batch, terms))
        by_row = self._learner.by_row(batch, found)
        shapes = [datum.inputs["target_tokens"].shape for datum in data]
        logprobs = [by_row[number]["logprobs"] for number in range(len(data))]
        cut = [own[:, : shape[1]] if len(shape) > 1 else own for own, shape in zip(logprobs, shapes, strict=True)]
        return pass_result(cut, {"loss:sum": total})

    def _row(self, number: int, datum: Datum, loss: Loss, several: tuple[int, ...]) -> TrainingRow:
        """Return a datum as a row whose labels are its targets. Raises RequestError."""
        where, count = f"data[{number}].loss_fn_inputs", len(datum.ids)
        if not count:
            raise RequestError(f"data[{number}].model_input: has no token; give at least one")
        if unknown := sorted(datum.inputs.keys() - loss.inputs.keys() - {"target_tokens"}):
            takes = ", ".join(["target_tokens", *loss.inputs])
            raise RequestError(f"{where}.{unknown[0]}: this loss does not read it; give {takes}")
        if not _has_targets(datum):
            raise RequestError(f"{where}.target_tokens: missing; give one id, or several, per token of model_input")
        labels = datum.inputs["target_tokens"]
        if labels.ndim > 1 and loss is not LOSSES["cross_entropy"]:
            raise RequestError(f"{where}.target_tokens: has shape {list(labels.shape)}; only cross_entropy takes several")
        streams = {"labels": labels}
        for name, default in loss.inputs.items():
            if name not in datum.inputs and default is None:
                raise RequestError(f"{where}.{name}: missing; give one number per token")
            streams[name] = datum.inputs.get(name, np.full(labels.shape, default))
        for name, values in streams.items():
            place = f"{where}.{'target_tokens' if name == 'labels' else name}"
            if values.shape != labels.shape or len(values) != count:
                shapes = f"{list(values.shape)} for {count} tokens and target_tokens of {list(labels.shape)}"
                raise RequestError(f"{place}: has shape {shapes}; give one entry per token of model_input")
            if not np.isfinite(values).all():
                raise RequestError(f"{place}: has values that are not finite; look for a division by 0")
        for place, ids in (("model_input", datum.ids), ("loss_fn_inputs.target_tokens", labels)):
            if ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= self._vocabulary:
                problem = f"data[{number}].{place}: has ids outside of the model's 0 to {self._vocabulary - 1}"
                raise RequestError(f"{problem}; use the tokenizer of get_info")
        if several and labels.ndim == 1:
            streams = {name: values[:, None] for name, values in streams.items()}
        if several:
            # a label without weight
            wide = ((0, 0), (0, several[0] - next(iter(streams.values())).shape[1]))
            streams = {name: np.pad(values, wide) for name, values in streams.items()}
        # the position after the last token is never computed
        return TrainingRow(np.append(datum.ids, 0), np.arange(1, count + 1), streams)

    def step(self, model: Model, settings: Adam) -> dict[str, Any]:
        """Make a step by the pending gradients. Raises RequestError, and drops them, if a pass before has failed."""
        try:
            if (fault := model.fault) is not None:
                model.fault = None
                fix = "its gradients are dropped: send all passes of this step again"
                raise RequestError(f"no step was made, because a pass before it failed ({fault}); {fix}")
            most, whose = settings.grad_clip_norm or float("inf"), f"adapter {model.adapter}"
            norm = clip_gradients(self._learner.accelerator, model.weights.values(), most, whose)
            for group in model.optimizer.param_groups:
                group.update(lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=settings.eps)
                group["weight_decay"] = settings.weight_decay
            model.optimizer.step()
            model.steps += 1
            return {"metrics": {"grad_norm": norm}}
        finally:
            model.optimizer.zero_grad()

    # ---- files

    def save(self, model: Model, folder: Path) -> Path:
        """Write the adapter in peft's format; return its file."""
        with self._policy.scoring_with(model.adapter):
            return self._policy.save_adapter(folder, self._policy.gather())

    def save_optimizer(self, model: Model, file: Path) -> None:
        state = {
            f"{slot}/{_bare(name, model)}": value.contiguous()
            for name, weight in model.weights.items()
            for slot, value in model.optimizer.state.get(weight, {}).items()
        }
        save_file({**state, "steps": torch.tensor(model.steps)}, file)

    @torch.no_grad()
    def load(self, model: Model, folder: Path, optimizer: Path | None) -> None:
        """Load an adapter and, if given, the optimizer's state, and drop pending gradients. Raises RequestError."""
        own = lora.weights_of(self._peft, model.adapter)
        saved = load_file(folder / WEIGHTS)
        if {name: value.shape for name, value in saved.items()} != {name: value.shape for name, value in own.items()}:
            raise RequestError(f"path: {folder} is an adapter of another shape or base; load one of this service's model")
        for name, value in own.items():
            value.copy_(saved[name])
        model.fault = None
        model.optimizer = torch.optim.AdamW(model.weights.values(), fused=True)
        if optimizer is not None:
            state = load_file(optimizer)
            model.steps = int(state.pop("steps"))
            by_name = {_bare(name, model): weight for name, weight in model.weights.items()}
            for key, value in state.items():
                slot, _, name = key.partition("/")
                weight = by_name[name]
                # torch keeps the number of steps on the weights' device where it is fused
                model.optimizer.state[weight][slot] = value.to(weight.device)

    def scores(self, model: Model) -> Scores:
        """Return the canary's log-probabilities, by which a server proves that it has this adapter."""
        with self._policy.scoring_with(model.adapter):
            return self._canary.trainer_scores(self._policy)


def _bare(name: str, model: Model) -> str:
    return name.replace(f".{model.adapter}", "")


def _has_targets(datum: Datum) -> bool:
    return "target_tokens" in datum.inputs


def _loss_of(request: PassRequest) -> tuple[Loss, dict[str, Any]]:
    """Return a request's loss and its options. Raises RequestError."""
    if (loss := LOSSES.get(request.loss)) is None:
        reason = REFUSED.get(request.loss, f"use one of {', '.join(LOSSES)}")
        raise RequestError(f"loss_fn: got {request.loss!r:.100}: {reason}")
    given = request.options()
    if unknown := sorted(given.keys() - loss.options.keys()):
        takes = f"it takes {', '.join(loss.options)}" if loss.options else "it takes none"
        raise RequestError(f"loss_fn_config.{unknown[0]}: {request.loss} has no such option; {takes}")
    return loss, named({**loss.options, **given})


def _modules(network: Any) -> Mapping[str, list[str]]:
    """Return the linear modules of the language model by the field of lora_config that trains them. Experts that are
    one tensor per layer, as in most mixtures, are no modules."""
    decoder, head = set(network.get_decoder().modules()), network.get_output_embeddings()
    found: dict[str, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in name:
            whole = name.removesuffix(".base_layer")
            if module is head or getattr(head, "base_layer", None) is module:
                found["train_unembed"].append(whole)
            elif module in decoder:
                is_attention = any("attn" in part or "attention" in part for part in whole.lower().split("."))
                found["train_attn" if is_attention else "train_mlp"].append(whole)
    return found




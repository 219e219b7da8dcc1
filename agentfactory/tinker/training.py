"""Models in training: each is an adapter on the Learner's network, with an optimizer and pending gradients of its own.

Everything here computes, and runs on one thread, one request at a time."""

import math
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from agentfactory.rollout.inference.adapter_config import WEIGHTS
from agentfactory.tinker.bodies import Adam, Lora
from agentfactory.tinker.losses import LOSSES, REFUSED, terms
from agentfactory.tinker.messages import Datum, PassRequest, RequestError, pass_result
from agentfactory.trainers.batches.batch import MicroBatch, TrainingRow
from agentfactory.trainers.networks import lora
from agentfactory.trainers.sync.canary import Canary
from agentfactory.trainers.sync.canary_verdict import Scores
from agentfactory.trainers.update.learner import Learner, Targets, Terms
from agentfactory.trainers.update.optimizer import clip_gradients

if TYPE_CHECKING:
    from peft import PeftModel

ALPHA = 32
"""The adapters' outputs are scaled by alpha / rank. The API has no field for it; its authors write 32."""


class Model:
    """A model in training. `fault` is the reason why its pending gradients are incomplete; `saved` is the number of
    steps that its newest checkpoint has; `name` is its id, and its adapter's name, which names in `weights` lack."""

    def __init__(self, name: str, config: Lora, weights: dict[str, nn.Parameter]) -> None:
        self.name, self.config, self.weights = name, config, weights
        self.optimizer = torch.optim.AdamW(weights.values(), fused=True)
        self.fault: str | None = None
        self.steps = self.saved = 0


class Trainer:
    """The models on one base, by a Learner, whose own adapter stays untrained."""

    def __init__(self, learner: Learner, canary: Canary, largest_rank: int) -> None:
        self._learner, self._canary, self._largest_rank = learner, canary, largest_rank
        self._policy = learner.policy
        self._peft: PeftModel = learner.policy.model  # type: ignore[assignment]
        self._modules = _modules(learner.policy.network)
        self.vocabulary = lora.table_of(learner.policy.network.get_output_embeddings()).shape[0]

    def create(self, name: str, config: Lora) -> Model:
        """Add a model: an adapter called `name`, determined by the seed. Raises RequestError."""
        from peft import LoraConfig

        if config.rank > self._largest_rank:
            problem = f"lora_config.rank: got {config.rank}, and this service takes {self._largest_rank} at most"
            raise RequestError(f"{problem}; lower it, or start the service with model.lora.rank={config.rank}")
        modules = [module for part, found in self._modules.items() if getattr(config, part) for module in found]
        if not modules:
            raise RequestError("lora_config: train_attn, train_mlp and train_unembed leave no module; set one of them")
        adapter = LoraConfig(r=config.rank, lora_alpha=ALPHA, target_modules=modules, task_type="CAUSAL_LM")
        torch.manual_seed(random.randrange(2**31) if config.seed is None else config.seed % 2**63)
        with warnings.catch_warnings():
            # a tied head gets its own factors, which is what train_unembed means
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            self._peft.add_adapter(name, adapter)
        self._thaw()
        trained = lora.trained_weights(self._peft, name)
        return Model(name, config, {key.replace(f".{name}", ""): weight for key, weight in trained.items()})

    def drop(self, model: Model) -> None:
        # peft would choose another adapter in place of one in use
        lora.use_adapter(self._peft, lora.POLICY_ADAPTER)
        self._peft.delete_adapter(model.name)
        self._thaw()

    def _thaw(self) -> None:
        """Undo that peft freezes all adapters but the one in use."""
        self._peft.set_requires_grad([*self._peft.peft_config])

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
        options, data = _options(request), request.data()
        shapes = [datum.inputs["target_tokens"].shape if "target_tokens" in datum.inputs else () for datum in data]
        several = max((shape[1] for shape in shapes if len(shape) > 1), default=None)
        rows = [self._row(number, datum, request.loss, several) for number, datum in enumerate(data)]
        found: list[dict[str, Targets]] = []

        def loss(index: int, part: MicroBatch, logprob: Targets, entropy: Targets) -> Terms:
            found.append({"logprobs": logprob.detach()})
            return Terms(terms(request.loss, logprob, part.streams, part.sequence, options).sum())

        with self._policy.scoring_with(model.name), torch.set_grad_enabled(not request.forward_only):
            batch = self._learner.deal(rows, normaliser=1.0)
            total = sum(float(part.loss) for part in self._learner.forward_backward(batch, loss))
        by_row = self._learner.by_row(batch, found)
        made = [by_row[number]["logprobs"].reshape(shape[0], -1) for number, shape in enumerate(shapes)]
        own = [scores[:, : math.prod(shape[1:])].reshape(shape) for scores, shape in zip(made, shapes, strict=True)]
        return pass_result(own, {"loss:sum": total})

    def _row(self, number: int, datum: Datum, loss: str, several: int | None) -> TrainingRow:
        """Return a datum as a row whose labels are its targets, `several` of them per token. Raises RequestError."""
        where, count = f"data[{number}].loss_fn_inputs", len(datum.ids)
        if not count:
            raise RequestError(f"data[{number}].model_input: has no token; give at least one")
        takes = {"target_tokens": None, **LOSSES[loss].inputs}
        for name in [*takes, *sorted(datum.inputs)]:
            if name not in takes:
                raise RequestError(f"{where}.{name}: this loss does not read it; give {', '.join(takes)}")
            if name not in datum.inputs and takes[name] is None:
                raise RequestError(f"{where}.{name}: missing; give one entry per token of model_input")
        labels = datum.inputs["target_tokens"]
        if labels.ndim > 1 and loss != "cross_entropy":
            problem = f"{where}.target_tokens: got {labels.shape[1]} per token"
            raise RequestError(f"{problem}; only cross_entropy takes several")
        streams = {name: datum.inputs.get(name, np.full(labels.shape, default)) for name, default in takes.items()}
        for name, values in streams.items():
            if values.shape != labels.shape or len(values) != count:
                problem = f"has shape {list(values.shape)}, for {count} tokens and targets of {list(labels.shape)}"
                raise RequestError(f"{where}.{name}: {problem}; give one entry per token of model_input")
            if not np.isfinite(values).all():
                raise RequestError(f"{where}.{name}: has values that are not finite; look for a division by 0")
        for place, ids in (("model_input", datum.ids), ("loss_fn_inputs.target_tokens", labels)):
            if ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= self.vocabulary:
                problem = f"data[{number}].{place}: has other values than ids from 0 to {self.vocabulary - 1}"
                raise RequestError(f"{problem}; use the tokenizer of get_info")
        if several is not None:
            # further labels have no weight
            blocks = {name: values.reshape(count, -1) for name, values in streams.items()}
            streams = {name: np.pad(block, ((0, 0), (0, several - block.shape[1]))) for name, block in blocks.items()}
        streams["labels"] = streams.pop("target_tokens")
        # the position after the last token is never computed
        return TrainingRow(np.append(datum.ids, 0), np.arange(1, count + 1), streams)

    def step(self, model: Model, settings: Adam) -> dict[str, Any]:
        """Make a step by the pending gradients. Raises RequestError, and drops them, if a pass before has failed."""
        try:
            if (fault := model.fault) is not None:
                model.fault = None
                fix = "its gradients are dropped: send all passes of this step again"
                raise RequestError(f"no step was made, because a pass before it failed ({fault}); {fix}")
            most = settings.grad_clip_norm or math.inf
            norm = clip_gradients(self._learner.accelerator, model.weights.values(), most, whose="model")
            for group in model.optimizer.param_groups:
                group.update(lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=settings.eps)
                group["weight_decay"] = settings.weight_decay
            model.optimizer.step()
            model.steps += 1
            return {"metrics": {"grad_norm": norm}}
        finally:
            model.optimizer.zero_grad()

    # ---- files

    def save(self, model: Model, folder: Path) -> tuple[Path, Scores]:
        """Write the adapter in peft's format; return its file, and the canary's log-probabilities, by which a server
        proves that it has this adapter. Raises RequestError if the model has diverged."""
        if not all(bool(weight.isfinite().all()) for weight in model.weights.values()):
            fix = "load an earlier checkpoint, and lower the learning rate"
            raise RequestError(f"the model has weights that are not finite since one of its steps; {fix}")
        with self._policy.scoring_with(model.name):
            file = self._policy.save_adapter(folder, self._policy.gather())
            return file, self._canary.trainer_scores(self._policy)

    def save_optimizer(self, model: Model, file: Path) -> None:
        states = {name: model.optimizer.state.get(weight, {}) for name, weight in model.weights.items()}
        slots = {f"{slot}/{name}": value for name, state in states.items() for slot, value in state.items()}
        save_file({**slots, "steps": torch.tensor(model.steps)}, file)

    @torch.no_grad()
    def load(self, model: Model, folder: Path, optimizer: Path | None) -> None:
        """Load an adapter and, if given, the optimizer's state, and drop pending gradients. Raises RequestError."""
        own, saved = lora.weights_of(self._peft, model.name), load_file(folder / WEIGHTS)
        if {name: value.shape for name, value in saved.items()} != {name: value.shape for name, value in own.items()}:
            raise RequestError("path: is an adapter of another shape; load it as a new model")
        for name, value in own.items():
            value.copy_(saved[name])
        model.fault = None
        model.optimizer.zero_grad()
        model.optimizer = torch.optim.AdamW(model.weights.values(), fused=True)
        if optimizer is not None:
            state = load_file(optimizer)
            model.steps = model.saved = int(state.pop("steps"))
            for key, value in state.items():
                slot, _, name = key.partition("/")
                model.optimizer.state[model.weights[name]][slot] = value.to(model.weights[name].device)


def _options(request: PassRequest) -> dict[str, float]:
    """Return the options of a request's loss. Raises RequestError if it, or one of its options, is not there."""
    if (loss := LOSSES.get(request.loss)) is None:
        reason = REFUSED.get(request.loss, f"use one of {', '.join(LOSSES)}")
        raise RequestError(f"loss_fn: got {request.loss!r:.100}: {reason}")
    given = request.options()
    for name in given.keys() - loss.options.keys():
        takes = ", ".join(loss.options) or "none"
        raise RequestError(f"loss_fn_config.{name:.100}: {request.loss} has no such option; it takes {takes}")
    return {**loss.options, **given}


def _modules(network: Any) -> Mapping[str, list[str]]:
    """Return the linear modules of the language model by the field of lora_config that trains them. Experts that are
    one tensor per layer, as in most mixtures, are no modules."""
    decoder, head = set(network.get_decoder().modules()), network.get_output_embeddings()
    found: dict[str, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in name:
            whole = name.removesuffix(".base_layer")
            is_attention = any("attn" in part or "attention" in part for part in whole.lower().split("."))
            if module in decoder:
                found["train_attn" if is_attention else "train_mlp"].append(whole)
            elif module is getattr(head, "base_layer", head):
                found["train_unembed"].append(whole)
    return found

"""The policy: a module that computes log-probabilities of chosen tokens from token ids."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentfactory.base.errors import SettingError
from agentfactory.rollout.images.image_tokens import BANNED_BIAS
from agentfactory.rollout.inference.adapter_config import WEIGHTS
from agentfactory.trainers.batches.batch import Batching
from agentfactory.trainers.batches.image_batches import Images
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks import lora
from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.networks.head import Scores
from agentfactory.trainers.networks.layers import precision
from agentfactory.trainers.networks.lora import POLICY_ADAPTER, has_adapter, table_of
from agentfactory.trainers.networks.network import Backbone, apply_options, load_network, proof_rows, resolve_batching
from agentfactory.trainers.networks.vision_tower import adapted_modules, banned_token_ids
from agentfactory.trainers.processes.accelerator import decided_by_rank_0

if TYPE_CHECKING:
    from peft import PeftModel

# Logits computed at a time: 2**26 in float32 are 256 MiB, whatever the vocabulary's size.
LOGITS_PER_CHUNK = 2**26

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Names in transformers' configurations for a soft cap on logits."""

Measure = Callable[[Float[Tensor, "chunk vocabulary"], slice], Float[Tensor, "chunk *several"]]
"""(logits of a chunk of the targets, the chunk) -> a further value, or several, per target."""


class Policy(Backbone):
    """A causal language model that scores tokens, in chunks. Log-softmax and entropy are at least in float32."""

    def __init__(
        self,
        model: "PreTrainedModel | PeftModel",
        dtype: torch.dtype,
        batching: Batching = "padded",
        banned: Sequence[int] = (),
        trained_tokens: Sequence[int] = (),
    ) -> None:
        """`banned` tokens get the servers' bias; the adapter trains the rows of `trained_tokens`."""
        super().__init__(model, dtype)
        self.batching = batching
        self.banned = list(banned)
        self._adapter = POLICY_ADAPTER
        self.trained_tokens = list(trained_tokens)

    def forward(
        self,
        ids: Int[Tensor, "batch length"],
        sources: Int[Tensor, "targets"],
        labels: Int[Tensor, "targets *several"],
        positions: Int[Tensor, "1 length"] | None = None,
        ends: Int[Tensor, "1 length"] | None = None,
        images: Images | None = None,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        measure: Measure | None = None,
    ) -> tuple[Float[Tensor, "targets *several"], ...]:
        """Return the log-probability of each label (one or several per target), the entropy in nats of the target's
        distribution (detached, unless `entropy_gradient`), and the value of `measure` if it is given.

        `sources` are flat indices into batch x length: the position whose output predicts the label. In a plain row it
        is the one before the label's own; in a tree it may be the end of the shared prefix. `positions`, `ends` and
        `images`: see `hidden`. Logits are divided by the sampling `temperature`."""
        if has_adapter(self.model):
            lora.use_adapter(self.model, self._adapter)

        def score(hidden: Tensor, labels: Tensor, chunk: slice) -> tuple[Tensor, ...]:
            logits = self.logits(hidden, temperature)
            total = logits.logsumexp(-1)
            chosen = logits.gather(-1, labels if labels.ndim > 1 else labels[:, None])
            logprob = (chosen - total[:, None]).reshape(labels.shape)
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                entropy = total - ((logits - total[:, None]).exp() * logits).sum(-1)
            return (logprob, entropy) if measure is None else (logprob, entropy, measure(logits, chunk))

        with torch.autocast(ids.device.type, dtype=self.dtype, enabled=self.dtype.itemsize < 4):
            hidden = self.hidden(ids, positions, ends, images).flatten(0, 1)[sources]
            head: Any = self.network.get_output_embeddings()
            size = max(1, LOGITS_PER_CHUNK // table_of(head).shape[0])
            plain = labels.ndim == 1 and measure is None and not entropy_gradient and self._soft_cap is None
            plain = plain and type(head) is nn.Linear and head.bias is None
            if plain and (dtype := precision(hidden, head.weight)) is not None:
                adjust = partial(self._adjusted, temperature=temperature)
                return tuple(Scores.apply(hidden.to(dtype), head.weight, labels, temperature, adjust, size))
            chunks = [slice(start, start + size) for start in range(0, max(1, len(labels)), size)]
            if len(chunks) == 1:
                return score(hidden, labels, chunks[0])
            # recompute a chunk's logits in the backward pass, so that only one set exists at a time
            parts = [checkpoint(score, hidden[part], labels[part], part, use_reentrant=False) for part in chunks]
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    @contextmanager
    def scoring_with(self, adapter: str) -> Iterator[None]:
        """Make forward passes in this context use this adapter."""
        self._adapter = adapter
        try:
            yield
        finally:
            self._adapter = POLICY_ADAPTER

    def logits(
        self, hidden: Float[Tensor, "chunk width"], temperature: float = 1.0
    ) -> Float[Tensor, "chunk vocabulary"]:
        """Return the logits of hidden states, as servers sample from them, divided by `temperature`."""
        logits = self.network.get_output_embeddings()(hidden)
        if self._soft_cap is not None:
            logits = torch.tanh(_wide(logits) / self._soft_cap) * self._soft_cap
        return _wide(self._adjusted(logits, temperature))

    @property
    def _soft_cap(self) -> float | None:
        config = self.network.config.get_text_config()
        return next((value for name in SOFT_CAPS if (value := getattr(config, name, None))), None)

    def _adjusted(self, logits: Tensor, temperature: float) -> Tensor:
        if self.banned:
            logits = _wide(logits)
            logits[:, self.banned] += BANNED_BIAS
        return _wide(logits) / temperature if temperature != 1.0 else logits

    def gather(self) -> Weights:
        """Return the trained weights, unsharded: the network's under their transformers names (tied ones once, in the
        policy's dtype), or those of the adapter in use under their peft names. All processes read them before the next
        update."""
        if has_adapter(self.model):
            return Weights(lora.adapter_weights(self.model, self._adapter).items())
        untied: dict[int, tuple[str, Tensor]] = {}
        for name, value in self.network.state_dict(keep_vars=True).items():
            untied.setdefault(id(value), (name, value))
        return Weights(untied.values(), self.dtype)

    def save_adapter(self, folder: Path, state: Mapping[str, Tensor]) -> Path:
        assert has_adapter(self.model)
        return lora.save_adapter(self.model, folder, state, self._adapter)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def load_policy(recipe: TrainRecipe, device: torch.device | str = "cpu", needs: lora.Needs = None) -> Policy:
    """Load the policy of a recipe, with trainable weights in float32, on `device` (under fsdp2 still on the CPU, and
    only on rank 0: see `load_on_rank_0`). `needs` are the tokens that the run needs; None if it is unknown; a function
    may wait for other processes while the network is loaded.

    With `model.lora`, the base is frozen in the model's dtype, and the adapter begins as `model.lora.from`, or as the
    recipe's seed determines. Raises SettingError if the model cannot be trained as requested."""
    network = load_network(recipe, device)
    needed = needs() if callable(needs) else needs

    def checked() -> tuple[Batching, list[int]]:
        check_head(network)
        embedding, head = map(table_of, (network.get_input_embeddings(), network.get_output_embeddings()))
        return resolve_batching(network, recipe.train), lora.tokens_to_train(embedding, head, recipe, needed)

    # the checks compute with the weights
    batching, tokens = decided_by_rank_0(checked) if recipe.train.is_sharded else checked()
    policy = make_policy(recipe, network, batching, device, tokens)
    if needed is not None and tokens:
        lora.set_initial_rows(policy.network, tokens, needed, recipe.seed)
    config = recipe.model.lora
    if has_adapter(policy.model) and config is not None and config.from_ is not None:
        folder = Path(config.from_)
        saved = lora.with_trained_rows(policy.network, load_file(folder / WEIGHTS))
        lora.load_adapter(policy.model, folder, saved)
    return policy


def make_policy(
    recipe: TrainRecipe,
    network: PreTrainedModel,
    batching: Batching,
    device: torch.device | str = "cpu",
    tokens: Sequence[int] = (),
) -> Policy:
    """Make a policy from a network: apply the recipe's options and add its adapter, if any, with the rows of `tokens`.
    No weight is read, so the network may have none."""
    config = recipe.model
    dtype: torch.dtype = getattr(torch, config.dtype)
    apply_options(network, recipe.train, device, batching)
    banned = banned_token_ids(network)
    if config.lora is None:
        return Policy(network, dtype, batching, banned).train()
    adapted = adapted_modules(network, config.lora.target_modules, recipe.train.trains_vision)
    model = lora.add_adapter(network, config.lora, adapted, recipe.seed, lora.tables_of(network, tokens))
    if config.lora.from_ is not None and recipe.train.has_reference:
        lora.add_reference_adapter(model)
    lora.compute_rows_alone(network)
    return Policy(model, dtype, batching, banned, tokens).train()


@torch.no_grad()
def check_head(network: PreTrainedModel) -> None:
    """Check that backbone and head give the network's logits, also in padded rows: some networks scale them further,
    and some attend to what follows. Raise SettingError if they differ.

    Compare rows of several lengths, padded, with the network's own forward pass of each alone, with eager attention. In
    half precision, kinds of attention round differently, which the layers of a pretrained network amplify to .8 nats:
    so the head is compared after the same attention, and the attention by its median effect on a row's hidden states,
    which is up to .1 by rounding."""
    name, cause = type(network).__name__, None
    try:
        problem = _fault(network)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each network has its own
        problem, cause = f"fails in a first forward pass: {type(error).__name__}: {error}", error
    if problem is not None:
        text = f"{name} {problem}" if cause else f"{name} {problem}; its log-probabilities would be wrong"
        raise SettingError("model.path", text, "train another model") from cause


def _fault(network: PreTrainedModel) -> str | None:
    network.eval()
    rows = proof_rows(network)
    config = network.config
    parts = {"": config, **{name: getattr(config, name, None) for name in config.sub_configs}}
    # a part that is no network, such as MPT's attn_config, has no implementation
    chosen = {name: kind for name, part in parts.items() if (kind := getattr(part, "_attn_implementation", None))}
    eager, exact = dict.fromkeys(chosen, "eager"), network.dtype == torch.float32
    network.set_attn_implementation(eager)
    policy = Policy(network, network.dtype)
    single = [policy.hidden(row[None])[0] for row in (rows[:1] if exact else rows)]
    if single[0].shape[-1] != network.get_output_embeddings().weight.shape[-1]:
        return "has further layers between its body and its head"
    logits = [network(row[None], use_cache=False).logits[0, :-1].float() for row in rows]
    scores = [line.log_softmax(-1).gather(-1, row[1:, None])[:, 0] for line, row in zip(logits, rows, strict=True)]
    expected, labels = torch.cat(scores), torch.cat([row[1:] for row in rows])
    # a row's last token is only predicted, as in training
    padded = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    if exact:
        network.set_attn_implementation(chosen)
        width = padded.shape[1]
        places = [number * width + torch.arange(len(row) - 1) for number, row in enumerate(rows)]
        found = Policy(network, network.dtype)(padded, torch.cat(places).to(padded.device), labels)[0]
        if torch.allclose(found, expected, atol=3e-4):
            return None
        network.set_attn_implementation(eager)
    same = torch.cat([policy(row[None], torch.arange(len(row) - 1, device=row.device), row[1:])[0] for row in rows])
    network.set_attn_implementation(chosen)
    policy = Policy(network, network.dtype)
    if exact:
        head, batch = torch.allclose(same, expected, atol=3e-4), False
    else:
        rounding = torch.finfo(network.dtype).eps * float(max(line.abs().max() for line in logits))
        # not of each token: rounding may choose other experts
        head = float((same - expected).abs().median()) <= 2 * rounding
        pairs = zip(policy.hidden(padded), [hidden[:-1] for hidden in single], strict=True)
        errors = [(a[: len(b)] - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-6) for a, b in pairs]
        batch = all(float(error.median()) < 0.3 for error in errors)
    if not head:
        return "changes its logits after the head in a way that the trainer does not support"
    return None if batch else "gives a row other results in a padded batch than alone with eager attention"

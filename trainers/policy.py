"""The policy: one module that turns token ids into log-probabilities of chosen tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.config import ModelConfig

# Logits that exist at a time: 2**26 in float32 are 256 MiB, whatever the vocabulary's size.
LOGITS_PER_CHUNK = 2**26


class Policy(nn.Module):
    """A causal language model that scores tokens.

    Backbone and head run inside `forward`, so that DDP and FSDP2 hooks, compile and LoRA see ordinary calls. The head
    runs only where a token is scored, in chunks; log-softmax and entropy are computed in float32.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> None:
        """`dtype` is the precision of the forward pass; below float32 it runs under autocast."""
        super().__init__()
        self.model = model
        self.dtype = dtype

    @property
    def network(self) -> Any:
        """The transformers model, with adapter layers in place if there is an adapter."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def is_lora(self) -> bool:
        """Whether an adapter is trained in place of the network's own weights."""
        return isinstance(self.model, PeftModel)

    def train(self, mode: bool = True) -> "Policy":
        """Switches only the adapter's dropout: a network's own dropout would make the trainer's log-probabilities
        differ from the server's."""
        super().train(False)
        self.training = mode
        for name, module in self.named_modules():
            if "lora_dropout" in name:
                module.train(mode)
        return self

    def forward(
        self,
        ids: Int[Tensor, "batch length"],
        sources: Int[Tensor, "targets"],
        labels: Int[Tensor, "targets"],
        positions: Int[Tensor, "batch length"] | None = None,
        mask: Bool[Tensor, "batch 1 length length"] | None = None,
        temperature: float = 1.0,
    ) -> tuple[Float[Tensor, "targets"], Float[Tensor, "targets"]]:
        """Log-probability of each label, and entropy in nats (detached) of the distribution it was drawn from.

        `sources` are flat indices into batch x length: the position whose output predicts the label, which is the one
        before the label's own in a plain row and the end of the shared prefix in a tree. Without `positions` and
        `mask` rows count from 0 and attend causally, which is exact for rows padded on the right. Logits are divided
        by the sampling `temperature`.
        """
        with torch.autocast(ids.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            hidden = self.network.base_model(
                input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False
            ).last_hidden_state
            hidden = hidden.flatten(0, 1)[sources]
            head = self.network.get_output_embeddings()
            size = max(1, LOGITS_PER_CHUNK // head.weight.shape[0])
            if len(labels) <= size:
                return self._score(hidden, labels, temperature)
            # more than one chunk: recompute a chunk's logits in the backward pass, so that only one set exists
            parts = [
                checkpoint(self._score, hidden[i : i + size], labels[i : i + size], temperature, use_reentrant=False)
                for i in range(0, len(labels), size)
            ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _score(
        self, hidden: Float[Tensor, "chunk width"], labels: Int[Tensor, "chunk"], temperature: float
    ) -> tuple[Float[Tensor, "chunk"], Float[Tensor, "chunk"]]:
        logits = self.network.get_output_embeddings()(hidden).float()
        cap = getattr(self.network.config.get_text_config(), "final_logit_softcapping", None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        logits = logits / temperature if temperature != 1.0 else logits
        total = logits.logsumexp(-1)
        logprob = logits.gather(-1, labels[:, None]).squeeze(-1) - total
        with torch.no_grad():
            entropy = total - ((logits - total[:, None]).exp() * logits).sum(-1)
        return logprob, entropy

    def gather(self) -> dict[str, Float[Tensor, "..."]]:
        """The weights that are trained, whole: the network's under their transformers names (tied ones once, in the
        policy's dtype), or the adapter's under their peft names. Sharded weights are gathered first, so every process
        calls this. The tensors may share memory with the policy's: use them before the next update.
        """
        if isinstance(self.model, PeftModel):
            adapter = {name: _whole(value) for name, value in self.model.named_parameters() if value.requires_grad}
            state = get_peft_model_state_dict(self.model, state_dict=adapter, save_embedding_layers=False)
            return {name: value.contiguous() for name, value in state.items()}
        gathered = {name: _whole(value) for name, value in _untied(self.network)}
        return {n: v.to(self.dtype if v.is_floating_point() else v.dtype).contiguous() for n, v in gathered.items()}

    def save_adapter(self, folder: Path, state: dict[str, Tensor]) -> Path:
        """Writes a gathered adapter to `folder` in peft's format and returns the file of its weights."""
        assert isinstance(self.model, PeftModel)
        folder.mkdir(parents=True, exist_ok=True)
        config = self.model.peft_config["default"]
        # what is read back is for use, not for training; the flag is part of peft's format
        config.inference_mode = True
        config.save_pretrained(str(folder))
        config.inference_mode = False
        file = folder / "adapter_model.safetensors"
        save_file({name: value.cpu() for name, value in state.items()}, file, metadata={"format": "pt"})
        return file


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def _untied(network: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The entries of a state dictionary, without the second names of tied weights."""
    seen: set[int] = set()
    for name, value in network.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


def load_policy(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> Policy:
    """The policy of a recipe's `model:` section, on `device`, with trainable weights in float32.

    With `lora`, the base is frozen and kept in the model's dtype, and `seed` decides the adapter's first weights.
    Raises ValueError where the model cannot be trained as asked.
    """
    if config.dtype == "float16":
        raise ValueError("model.dtype: float16 gradients vanish without loss scaling; use bfloat16 or float32")
    if (Path(config.path) / "adapter_config.json").exists():
        raise ValueError(
            f"model.path: {config.path} holds a LoRA adapter, not a model; to train on, set model.path to the base "
            "model named in its adapter_config.json, or train the stage before without model.lora"
        )
    dtype: torch.dtype = getattr(torch, config.dtype)
    network: Any = AutoModelForCausalLM.from_pretrained(config.path, dtype=dtype if config.lora else torch.float32)
    network.to(device)
    _check_head(network)
    if config.lora is None:
        return Policy(network, dtype).train()
    alpha: Any = config.lora.alpha if config.lora.alpha is not None else 2 * config.lora.rank
    lora = PeftLoraConfig(
        r=config.lora.rank,
        lora_alpha=alpha,
        lora_dropout=config.lora.dropout,
        target_modules=config.lora.target_modules,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    model: Any = get_peft_model(network, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return Policy(model, dtype).train()


@torch.no_grad()
def _check_head(network: PreTrainedModel) -> None:
    """The policy calls backbone and head itself; some networks do more to their logits (scale them, say).

    Compares one short forward pass with the network's own and raises ValueError where they differ.
    """
    network.eval()
    ids = torch.arange(8, device=network.device)[None] % network.config.get_text_config().vocab_size
    sources, labels = torch.arange(7, device=network.device), ids[0, 1:]
    expected = network(ids).logits[0, :-1].float().log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    given, _ = Policy(network, network.dtype)(ids, sources, labels)
    if not torch.allclose(given, expected, atol=1e-3 if network.dtype == torch.float32 else 0.1):
        raise ValueError(
            f"model.path: {type(network).__name__} changes its logits after the head in a way that the trainer does "
            "not know; its log-probabilities would be wrong"
        )

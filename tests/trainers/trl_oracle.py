"""TRL's trainers on recorded chains: TRL's unmodified code for advantages, importance weights and loss, with a test's
log-probabilities, entropies and rewards instead of a model's and a reward function's."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

Table = Float[Tensor, "chains width"]

ROLES = ("behaviour", "proximal", "current", "reference")


@dataclass
class Chains:
    """Chains without their prompts, and numbers for every position, which are meaningful only at sampled ones."""

    token_ids: list[list[int]]
    masks: list[list[int]]
    """1 for sampled tokens, 0 for tool tokens."""
    rewards: list[float | None]
    logprobs: dict[str, Table]
    """Log-probabilities by role: the server's, the trainer's before the update and now, and the reference's."""
    entropy: Table

    @classmethod
    def random(cls, count: int, spread: float = 0.3, seed: int = 0) -> "Chains":
        rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
        masks = [[1] * rng.randint(1, 4) for _ in range(count)]
        for mask in masks:
            for _ in range(rng.randint(0, 3)):
                mask += [0] * rng.randint(1, 3) + [1] * rng.randint(1, 4)
        shape = (count, max(map(len, masks)))
        # in single precision, like the server's in TRL
        behaviour = (-1 - 3 * torch.rand(shape, generator=draw)).double()
        own = {role: behaviour + spread * torch.randn(shape, dtype=torch.float64, generator=draw) for role in ROLES[1:]}
        return cls(
            token_ids=[[rng.randrange(3, 60) for _ in mask] for mask in masks],
            masks=masks,
            rewards=[rng.random() for _ in masks],
            logprobs={"behaviour": behaviour, **own},
            entropy=3 * torch.rand(shape, dtype=torch.float64, generator=draw),
        )

    @property
    def lengths(self) -> list[int]:
        return [sum(mask) for mask in self.masks]

    def at_sampled(self, table: Table) -> Float[Tensor, "targets"]:
        return torch.cat([table[i, : len(mask)][torch.tensor(mask) > 0] for i, mask in enumerate(self.masks)])


class _Recorded:
    """A mixin that answers from `chains` where a trainer would generate, score or run its model."""

    chains: Chains
    with_tools: bool

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids = [[3, 4]] * len(prompts)
        texts = [""] * len(prompts)
        if not self.with_tools:
            return prompt_ids, self.chains.token_ids, texts
        behaviour = self.chains.logprobs["behaviour"]
        # a server reports nothing about tokens that it did not sample
        sampled = [
            [value if kept else float("nan") for value, kept in zip(row.tolist(), mask, strict=False)]
            for row, mask in zip(behaviour, self.chains.masks, strict=True)
        ]
        return prompt_ids, self.chains.token_ids, self.chains.masks, texts, sampled, {}, None, []

    def _calculate_rewards(self, *_: Any) -> Float[Tensor, "chains 1"]:
        rewards = [float("nan") if reward is None else reward for reward in self.chains.rewards]
        return torch.tensor(rewards, dtype=torch.float64)[:, None]

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Table, Table, None]:
        role = "current" if torch.is_grad_enabled() else "proximal"
        if model is self.ref_model:  # type: ignore[attr-defined]
            role = "reference"
        return self.chains.logprobs[role], self.chains.entropy, None


class GrpoOracle(_Recorded, GRPOTrainer):
    """TRL's GRPOTrainer on recorded chains, all of one step."""

    with_tools = True

    def score(self, mismatch: str | None = None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
        """Return the inputs of the loss: advantages, log-probabilities before the update, importance weights if
        requested."""
        self.use_vllm = self.vllm_importance_sampling_correction = mismatch is not None
        self.vllm_importance_sampling_mode = mismatch
        self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max = low, high
        return _score(self)

    def loss(self, scored: dict[str, Any]) -> Float[Tensor, ""]:
        self.current_gradient_accumulation_steps = 1
        self.model.train()
        return self._compute_loss(self.model, scored)


class RlooOracle(_Recorded, RLOOTrainer):
    with_tools = False

    def score(self) -> dict[str, Any]:
        return _score(self)


def _score(trainer: Any) -> dict[str, Any]:
    trainer.model.train()
    return trainer._generate_and_score_completions([{"prompt": ""}] * len(trainer.chains.masks))


def make_oracle(kind: type, folder: Path, output: Path, chains: Chains, group_size: int, **settings: Any) -> Any:
    oracle = make_trainer(kind, folder, output, len(chains.masks), group_size, **settings)
    oracle.chains = chains
    return oracle


def make_trainer(kind: type, folder: Path, output: Path, rows: int, group_size: int, **settings: Any) -> Any:
    """Create one of TRL's trainers for the model in `folder`, on the CPU, with all `rows` of a step in one
    micro-batch."""
    config: Callable[..., Any] = RLOOConfig if issubclass(kind, RLOOTrainer) else GRPOConfig
    return kind(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config(
            output_dir=str(output),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=rows,
            num_generations=group_size,
            # with several updates per batch TRL keeps the log-probabilities from before them
            num_iterations=2,
            report_to=[],
            **settings,
        ),
        train_dataset=Dataset.from_list([{"prompt": "w3 w4"}] * 2),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )

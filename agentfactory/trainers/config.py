"""The part of a recipe that the trainers package owns: train, sync, placement and track."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from agentfactory.rollout.config import EqualRewards, RolloutRecipe
from agentfactory.tools.config import Options, Section
from agentfactory.tools.errors import SettingError
from agentfactory.trainers.health import Symptom

PositiveInt = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]

ACCELERATE = (Path(__file__).parents[1] / "recipes" / "accelerate").resolve()
"""The configurations of accelerate's launcher, a file for each `train.strategy`."""


ESTIMATORS = ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae")
POLICIES = ("clip", "gspo", "cispo", "sapo", "reinforce")


def _named(name: str, ours: tuple[str, ...], kind: str = "function") -> str:
    if name not in ours and ".py:" not in name:
        raise SettingError("", f"got {name!r}", f"use {', '.join(ours)}, or FILE.py:NAME of a {kind} of your own")
    return name


def _of(*names: str) -> dict[str, Any]:
    """Marks a field as an option of these estimators or policy losses alone."""
    return {"of": names}


class AdvantageConfig(Section):
    """From rewards to a number per sampled token."""

    estimator: str = "grpo"
    """grpo: reward less the group's mean; rloo: less the mean of the others; reinforce_pp: return, whitened over the
    batch; reinforce_pp_baseline: less the group's mean, whitened over the batch; gae: by a learned critic; or
    `FILE.py:NAME` of a function of your own (docs/add-an-algorithm.md)."""
    options: Options = {}
    """FILE.py:NAME: what its further parameters get."""
    scale: Literal["none", "group", "batch"] = Field(default="group", json_schema_extra=_of("grpo"))
    """grpo: divide by the standard deviation of the group's rewards, or of the batch's."""
    malformed_turns: Literal["blamed", "like_others"] = "blamed"
    """blamed: tokens of a turn whose calls cannot be read have an advantage of at most minus the root mean square of
    their group's, so that a chain that succeeds in spite of one does not teach it."""
    gamma: Share = Field(default=1.0, json_schema_extra=_of("reinforce_pp", "gae"))
    """reinforce_pp, gae: discount per sampled token."""
    gae_lambda: Share = Field(default=1.0, json_schema_extra=_of("gae"))
    """gae: 1 weighs whole returns, less trusts the critic more."""

    @field_validator("estimator")
    @classmethod
    def _check_estimator(cls, estimator: str) -> str:
        return _named(estimator, ESTIMATORS)


class KlConfig(Section):
    """Distance to the reference: the model that training began with."""

    coefficient: float = Field(default=0.0, ge=0)
    """0 loads no reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimate of KL(policy || reference), with d = log policy - log reference: k1 = d, k2 = d^2 / 2,
    k3 = exp(-d) - 1 + d. In the loss k2 or k3: see docs/algorithms.md."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or a cost per token that advantages see (reinforce_pp and gae only)."""


class MismatchConfig(Section):
    """Correction of what trainer and server disagree about: ratios of proximal over behaviour probabilities."""

    correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = "token_truncate"
    """truncate: weigh terms by the ratio, at most `high` (TIS); mask: by the ratio, and by 0 outside [low, high]
    (token_mask is IcePop); of the token, or of its sequence (product over its tokens). geometric_mask: by 1, and by 0
    where the sequence's geometric mean is outside: bounds close to 1, such as 0.99 and 1.01."""
    low: float = Field(default=0.5, ge=0)
    """Smallest ratio that a mask lets pass."""
    high: float = Field(default=2.0, gt=0)
    """Largest ratio."""


class LossConfig(Section):
    """What is minimised, per sampled token."""

    policy: str = "clip"
    """clip: PPO's clipped surrogate; gspo: the same on the sequence's ratio; cispo: clipped weights; sapo: a soft gate;
    reinforce: plain policy gradient; or `FILE.py:NAME` of a function of your own (docs/add-an-algorithm.md)."""
    options: Options = {}
    """FILE.py:NAME: what its further parameters get."""
    clip_low: float = Field(default=0.2, ge=0, json_schema_extra=_of("clip", "gspo"))
    """clip, gspo: probability ratios are clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0, json_schema_extra=_of("clip", "gspo", "cispo"))
    """clip, gspo, cispo: probability ratios are clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1, json_schema_extra=_of("clip", "gspo"))
    """clip, gspo: where the advantage is negative, ratios count at most this much."""
    sapo_positive: float = Field(default=1.0, gt=0, json_schema_extra=_of("sapo"))
    """sapo: temperature of the gate where the advantage is positive."""
    sapo_negative: float = Field(default=1.05, gt=0, json_schema_extra=_of("sapo"))
    """sapo: temperature of the gate elsewhere."""
    normaliser: Literal["token", "sequence", "sequence_sum", "constant"] = "token"
    """token: mean over all tokens (DAPO); sequence: over each chain's tokens, then over chains (GRPO); sequence_sum:
    sum over tokens, mean over chains; constant: sum over chains x rollout.max_total_tokens (Dr. GRPO)."""
    kl: KlConfig = KlConfig()
    behaviour_kl: float = Field(default=0.3, ge=0)
    """Weight of the distance to the weights that sampled, KL(policy || behaviour), which holds the policy where its
    data come from while they are old (rollout.max_staleness). Nothing where the two agree: see docs/staleness.md."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, which is raised."""
    top_entropy: float = Field(default=1.0, gt=0, le=1)
    """Share of the batch's tokens, those of highest entropy, that the policy term is trained on."""
    mismatch: MismatchConfig = MismatchConfig()

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str) -> str:
        return _named(policy, POLICIES)


class CriticConfig(Section):
    """gae: the value function. With an adapter it is a second adapter on the same base, else a network of its own."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Of the critic, whatever the policy's is."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Values are clipped to this distance from those at the start of the update; null does not clip."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which only the critic learns."""


class OverlongConfig(Section):
    """Soft punishment of long chains (DAPO, equation 13): from 0 at max_total_tokens - buffer down to -penalty."""

    buffer: PositiveInt
    """Tokens before rollout.max_total_tokens over which the punishment grows."""
    penalty: float = Field(default=1.0, gt=0)
    """What a chain of rollout.max_total_tokens loses."""


class ParameterGroup(Section):
    """Trainable weights whose names match get settings of their own; the first group that matches counts."""

    match: str
    """Regular expression, searched in the weight's name."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Null is the recipe's."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Null is the optimiser's."""


class OptimizerConfig(Section):
    """How gradients change weights."""

    name: Literal["adamw", "adamw_8bit", "adafactor", "lion", "muon", "sgd"] = "adamw"
    """adamw is torch's fused one; adamw_8bit and lion need bitsandbytes on a GPU; muon updates the matrices within
    layers, and adamw all else. Under fsdp2: adamw or sgd."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of adamw, adamw_8bit and lion; the first is the momentum of muon and sgd."""
    eps: float = Field(default=1e-8, gt=0)
    """adamw (muon's as well), adamw_8bit."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Norms and biases, which have one dimension, do not decay."""
    groups: list[ParameterGroup] = []
    """Settings by name of the weights."""


class TrainConfig(Section):
    """How the policy learns."""

    algorithm: Literal[
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "sapo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "ppo",
        "sft",
    ] = "grpo"
    """Sets the defaults of `advantage`, `loss` and others, each of which the recipe may change; sft: supervised
    fine-tuning on conversations or saved rows."""
    steps: PositiveInt
    """Optimiser steps (SFT) or batches of fresh groups."""
    batch_size: PositiveInt = 8
    """Groups, or rows (SFT), per step, over all processes."""
    updates_per_batch: PositiveInt = 1
    """Optimiser updates on each batch of groups."""
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    critic: CriticConfig = CriticConfig()
    overlong: OverlongConfig | None = None
    """Punish chains near rollout.max_total_tokens."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Of the policy, after the warm-up; adapters want some ten times what all weights do."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine end at 0, wsd stays constant and ends with
    decay_steps down to 0."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises from 0, linearly."""
    decay_steps: int = Field(default=0, ge=0)
    """wsd: steps of the decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    batching: Literal["auto", "padded", "packed", "tree"] = "auto"
    """padded: a row each; packed: rows end to end; tree: rows share what they have in common; auto: tree where the
    model's attention lets it be exact, else padded."""
    token_budget: PositiveInt = 16384
    """Tokens (padding included) per micro-batch and process."""
    attention: Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2"] = "auto"
    """Implementation of attention in the trainer; auto is transformers' choice. The last two need a GPU."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of layers, and compute the rest again in the backward pass."""
    activation_offload: bool = False
    """Keep what gradient_checkpointing keeps in the memory of the CPU."""
    liger: bool = False
    """Layer kernels of liger-kernel (GPU)."""
    compile: bool = False
    """torch.compile of the backbone's layers."""
    from_trajectories: str | None = None
    """Train on saved groups (a JSONL file or a folder of them), without worker or server."""
    min_reward: float | None = None
    """sft on from_trajectories: learn only chains with at least this reward (rejection sampling); null takes all that
    did not fail."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 writes one at the end."""
    keep_last: PositiveInt | None = None
    """Delete older checkpoints than the last so many; null keeps all."""
    keep_best: str | None = "auto"
    """Metric whose highest checkpoint is kept too; auto is eval/sampled/success, or eval/sampled/reward where tasks
    have no success. Where it is an evaluation's, each one that is the best so far (eval.every) is followed by a
    checkpoint. null keeps none for it."""
    stop_when: list[Symptom] = []
    """End the run, with the status `stopped`, at the first of these symptoms, which are told in any case. no_gradient:
    nothing to learn in 5 steps; entropy, mismatch: far from what they were; success: less than half its best. See
    docs/troubleshooting.md."""
    processes: PositiveInt = 1
    """Trainer processes; a launch with another number is refused."""
    strategy: Literal["single", "ddp", "fsdp2"] = "single"
    """How processes share the work; a launch that accelerate set up otherwise is refused."""

    @property
    def has_critic(self) -> bool:
        """Whether a critic learns beside the policy."""
        return self.algorithm != "sft" and self.advantage.estimator == "gae"

    @property
    def has_reference(self) -> bool:
        """Whether the policy's distance to the reference counts."""
        return self.algorithm != "sft" and self.loss.kl.coefficient > 0


class SyncConfig(Section):
    """How new weights reach the inference server."""

    backend: str = "auto"
    """lora: the adapter's files; file: full weights as safetensors, on a disk that the servers read; nccl: full weights
    by broadcast from GPU to GPUs, to vLLM only; ipc: full weights through memory that trainer and server share, on one
    GPU (vLLM) or one machine's CPU (embedded); auto: lora when model.lora is set, ipc where both use one GPU, else
    file; or `FILE.py:NAME` of a class of your own (docs/add-a-sync-backend.md). (nccl and ipc: untested on a GPU so
    far.)"""
    options: Options = {}
    """FILE.py:NAME: what its further parameters get."""

    @field_validator("backend")
    @classmethod
    def _check_backend(cls, backend: str) -> str:
        return _named(backend, ("auto", "file", "lora", "nccl", "ipc"), "class")

    @model_validator(mode="after")
    def _options_are_for_ones_own(self) -> "SyncConfig":
        if self.options and ".py:" not in self.backend:
            raise SettingError("options", f"got {self.options} with sync.backend={self.backend}", "remove it")
        return self


class PlacementConfig(Section):
    """Which devices the trainer and the server that is started here use."""

    mode: Literal["auto", "separate", "split", "time_share"] = "auto"
    """separate: different GPUs; split: one GPU, whose memory they share; time_share: one GPU, which they use in turns;
    auto: separate where there are GPUs enough, else split where it fits, else time_share. Without a GPU auto is
    separate: both are processes on the CPU."""
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of one GPU to plan for, in GiB; null is that of the GPUs here. With it a recipe's memory table can be had,
    and is held to it, on any machine."""
    on_misfit: Literal["refuse", "warn"] = "refuse"
    """What becomes of a recipe that does not fit by the memory table, some of whose figures are assumptions: it is
    refused, or tried with a warning."""


class TrackConfig(Section):
    """What is kept for people to look at beside metrics.jsonl."""

    trackers: list[Literal["wandb", "tensorboard", "trackio", "mlflow"]] = []
    """Experiment trackers that get the same numbers under the same names; each is installed by its own name. They take
    their addresses and keys from their own environment variables: see docs/tracking.md."""
    project: str = Field(default="agentfactory", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Project of the trackers (an experiment of mlflow), in which runs are compared."""
    trajectories: int = Field(default=4, ge=0)
    """Chains per step, from the lowest to the highest reward, that trackers with tables (wandb, trackio, mlflow) get
    as text; wandb and trackio get their images too. 0: none."""
    credit: bool = True
    """Keep what each trained token was credited with, and the trainer's log-probability of it, in
    trajectories/credit.jsonl: the viewer shows them."""

    @field_validator("trackers")
    @classmethod
    def _check_trackers(cls, trackers: list[str]) -> list[str]:
        if len(set(trackers)) < len(trackers):
            raise SettingError("", f"got {', '.join(trackers)}", "name each once")
        return trackers


ALGORITHMS: dict[str, dict[str, Any]] = {
    # DeepSeekMath (arXiv:2402.03300), with DAPO's normaliser: a chain of many turns is not to weigh less per token
    "grpo": {},
    # arXiv:2503.20783
    "dr_grpo": {"train.advantage.scale": "none", "train.loss.normaliser": "constant"},
    # arXiv:2503.14476
    "dapo": {"train.loss.clip_high": 0.28, "rollout.equal_rewards": EqualRewards.REFILL},
    # arXiv:2507.18071, section 5.1
    "gspo": {
        "train.loss.policy": "gspo",
        "train.loss.clip_low": 3e-4,
        "train.loss.clip_high": 4e-4,
        "train.loss.normaliser": "sequence",
    },
    # MiniMax-M1 (arXiv:2506.13585)
    "cispo": {"train.loss.policy": "cispo", "train.loss.clip_high": 4.0},
    # arXiv:2511.20347
    "sapo": {"train.loss.policy": "sapo", "train.loss.normaliser": "sequence"},
    # arXiv:2402.14740
    "rloo": {"train.advantage.estimator": "rloo"},
    # arXiv:2501.03262
    "reinforce_pp": {"train.advantage.estimator": "reinforce_pp"},
    "reinforce_pp_baseline": {"train.advantage.estimator": "reinforce_pp_baseline"},
    # arXiv:1707.06347
    "ppo": {"train.advantage.estimator": "gae"},
    "sft": {},
}
"""What each algorithm's defaults are, by field of the recipe."""


def owners(section: Section, name: str) -> tuple[str, ...]:
    """The estimators or policy losses that a field is an option of; empty: it is no such option."""
    extra = type(section).model_fields[name].json_schema_extra
    found = extra.get("of", ()) if isinstance(extra, dict) else ()
    return tuple(found) if isinstance(found, tuple) else ()


def _applies(section: Section, name: str) -> bool:
    chosen = getattr(section, "policy", None) or getattr(section, "estimator", None)
    return not (of := owners(section, name)) or chosen in of


class TrainRecipe(RolloutRecipe):
    """The recipe fields that the trainers package reads."""

    train: TrainConfig
    sync: SyncConfig = SyncConfig()
    placement: PlacementConfig = PlacementConfig()
    track: TrackConfig = TrackConfig()

    @property
    def rounding(self) -> dict[str, str]:
        """The fields, with their values, by which the server samples from other weights than are trained: the server's
        are rounded, or the base that the trainer's adapter is on."""
        lora = self.model.lora
        fields = {
            "server.model": self.server.model,
            "server.quantization": self.server.quantization,
            "model.lora.quantization": lora.quantization if lora else None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @model_validator(mode="after")
    def _apply_algorithm(self) -> "TrainRecipe":
        """The algorithm's defaults, where the recipe says nothing; saved groups are not filtered."""
        for name, value in ALGORITHMS[self.train.algorithm].items():
            if name.startswith("rollout.") and self.train.from_trajectories:
                continue
            section: Any = self
            *path, last = name.split(".")
            for key in path:
                section = getattr(section, key)
            if last not in section.model_fields_set and _applies(section, last):
                setattr(section, last, value)
        return self

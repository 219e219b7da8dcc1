"""The part of a recipe that the trainers package owns: train, sync, placement and track."""

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from agentfactory.base.config import Choice, Options, PositiveFloat, PositiveInt, Section, TypedOptions
from agentfactory.base.errors import Fault, SettingError
from agentfactory.base.messages import LARGEST_REWARD
from agentfactory.rollout.config import EqualRewards, RolloutRecipe
from agentfactory.rollout.config.server import TeacherServer
from agentfactory.rollout.config.sources import SourceConfig, sections

Share = Annotated[float, Field(ge=0, le=1)]

ACCELERATE = (Path(__file__).parents[1] / "recipes" / "accelerate").resolve()
"""Configurations for accelerate's launcher, one file per `train.strategy`."""
PORTLESS_OPTIONS = ("--rdzv_backend", "c10d", "--rdzv_conf", "store_type=file,keep_alive_interval=86400")
"""Options that make accelerate's launcher on one machine keep its store in a file. Keep-alives are rare because each
one lengthens the file, and no other launcher waits for them."""
PORTLESS_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment variables to use with PORTLESS_OPTIONS: by default the launcher opens a TCP store for the ranks."""

ESTIMATORS = ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "gigpo", "raft", "none")
POLICIES = ("clip", "gspo", "cispo", "sapo", "reinforce")
CONTEXTS = ("solution", "answer", "errors")


def _one_of(ours: tuple[str, ...], kind: str = "function") -> AfterValidator:
    def check(name: str) -> str:
        if name not in ours and ".py:" not in name:
            raise SettingError("", f"got {name!r}", f"use {', '.join(ours)}, or FILE.py:NAME of a {kind} of your own")
        return name

    return AfterValidator(check)


Precision = Literal["auto", "fp8", "fp8_rowwise"]


class Symptom(StrEnum):
    """A kind of problem in a run."""

    NO_GRADIENT = "no_gradient"
    ENTROPY = "entropy"
    MISMATCH = "mismatch"
    SUCCESS = "success"
    UNSTABLE = "unstable"
    FORMAT = "format"
    LATE_CHAINS = "late_chains"


class ScaleOptions(Section):
    """Options of estimators that compare the chains of a group: `estimator: grpo`."""

    scale: Literal["none", "group", "batch"] = "group"
    """Divide by the standard deviation of the group's rewards (gigpo: or of the returns of turns in the same state), or
    of the batch's (grpo only)."""


class ReturnOptions(Section):
    """Options of estimators that use returns: `estimator: reinforce_pp`."""

    gamma: Share = 1.0
    """Discount, per sampled token (reinforce_pp, gae) or per turn (gigpo)."""


class GaeOptions(ReturnOptions):
    """Options of `estimator: gae`, which trains a critic. With an adapter, the critic is a second adapter on the same
    base; otherwise a separate network."""

    gae_lambda: Share = 1.0
    """1 uses whole returns; lower values rely more on the critic."""
    value_clip: ClassVar[float] = 0.2
    """Maximum distance of a value from its value at the start of the update."""
    critic_learning_rate: float = Field(default=1e-5, gt=0)
    """Learning rate of the critic, independent of the policy's."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Number of initial steps in which only the critic learns."""


class GigpoOptions(ScaleOptions, ReturnOptions):
    """Options of `estimator: gigpo`."""

    def _faults(self) -> Iterator[Fault]:
        if self.scale == "batch":
            yield "scale", "got 'batch'", "use none or group"


class AdvantageConfig(Choice):
    """Advantage of each sampled token, computed from the rewards."""

    chooser = "estimator"
    kinds = {"grpo": ScaleOptions, "reinforce_pp": ReturnOptions, "gae": GaeOptions, "gigpo": GigpoOptions}

    estimator: Annotated[str, _one_of(ESTIMATORS)] = "grpo"
    """grpo: reward minus the group's mean; rloo: reward minus the mean of the others; reinforce_pp: return, whitened
    over the batch; reinforce_pp_baseline: reward minus the group's mean, whitened over the batch; gae: with a learned
    critic; gigpo: grpo's advantage, plus the turn's among turns in the same state (equal Environment.anchor, or
    without one equal messages since the model's previous turn); raft: 1 for the group's best chains,
    0 for the others; none: 0, so that only the teacher trains; or `FILE.py:NAME` of your own function
    (docs/add-an-algorithm.md)."""
    options: TypedOptions = None
    """Options of the estimator; for your own function, its additional arguments."""
    malformed_turns: Literal["blamed", "like_others"] = "blamed"
    """blamed: tokens of a turn with unparsable tool calls get an advantage of at most minus the root mean square of
    their group's advantages, so that a chain that succeeds despite such a turn does not reinforce it."""


class KlConfig(Section):
    """KL divergence from the reference, which is the initial model."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the divergence; 0 loads no reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimate of KL(policy || reference), with d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 =
    exp(-d) - 1 + d. In the loss, use k2 or k3: see docs/algorithms.md."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss; reward: a cost per token, included in the advantages (reinforce_pp and gae only)."""


class CapOptions(Section):
    """Options of corrections that cap the ratio."""

    high: float = Field(default=2.0, gt=0)
    """Largest ratio."""


class MaskOptions(CapOptions):
    """Options of corrections that mask."""

    low: float = Field(default=0.5, ge=0)
    """Smallest ratio that the mask lets through."""

    def _faults(self) -> Iterator[Fault]:
        if self.low >= self.high:
            yield "low", f"got {self.low}, and high is {self.high}", "lower it"


class MismatchConfig(Choice):
    """Correction of the mismatch between trainer and server by the ratio of proximal to behaviour probabilities."""

    chooser = "correction"
    kinds = {
        "token_truncate": CapOptions,
        "token_mask": MaskOptions,
        "sequence_truncate": CapOptions,
        "sequence_mask": MaskOptions,
        "geometric_mask": MaskOptions,
    }

    correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = "token_truncate"
    """truncate: multiply each term by the ratio, capped at `high` (TIS). mask: multiply by the ratio, or by 0 outside
    [low, high] (token_mask is IcePop). The ratio is the token's, or its sequence's (the product over its tokens).
    geometric_mask: multiply by 1, or by 0 if the sequence's geometric mean is outside [low, high]; use bounds close to
    1, such as 0.99 and 1.01."""
    options: TypedOptions = None
    """Options of the correction."""


class CispoOptions(Section):
    """Options of `policy: cispo`."""

    clip_high: float = Field(default=0.2, ge=0)
    """Upper bound of probability ratios is 1 + clip_high."""


class ClipOptions(CispoOptions):
    """Options of `policy: clip` and `policy: gspo`."""

    clip_low: float = Field(default=0.2, ge=0)
    """Lower bound of probability ratios is 1 - clip_low."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of ratios if the advantage is negative."""


class LossConfig(Choice):
    """The loss per sampled token."""

    chooser = "policy"
    kinds = {"clip": ClipOptions, "gspo": ClipOptions, "cispo": CispoOptions}

    policy: Annotated[str, _one_of(POLICIES)] = "clip"
    """clip: PPO's clipped surrogate; gspo: the same with the sequence's ratio; cispo: clipped weights; sapo: a soft
    gate; reinforce: plain policy gradient; or `FILE.py:NAME` of your own function (docs/add-an-algorithm.md)."""
    options: TypedOptions = None
    """Options of the policy loss; for your own function, its additional arguments."""
    normaliser: Literal["token", "sequence", "sequence_sum", "constant"] = "token"
    """token: mean over all tokens (DAPO); sequence: mean over each chain's tokens, then over chains (GRPO);
    sequence_sum: sum over tokens, mean over chains; constant: sum divided by max_total_tokens, mean over chains
    (Dr. GRPO)."""
    kl: KlConfig = KlConfig()
    behaviour_kl: float = Field(default=0.3, ge=0)
    """Weight of KL(policy || behaviour), the divergence from the weights that sampled. It keeps the policy close to
    stale data (rollout.max_staleness), and is 0 where the two agree: see docs/staleness.md."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus, which raises the policy's entropy."""
    top_entropy: float = Field(default=1.0, gt=0, le=1)
    """Share of the batch's tokens that the policy term trains: the ones with the highest entropy."""
    mismatch: MismatchConfig = MismatchConfig()


class OverlongConfig(Section):
    """Soft penalty for long chains (DAPO, equation 13): from 0 at max_total_tokens - buffer down to -penalty."""

    buffer: PositiveInt
    """Number of tokens before rollout.max_total_tokens over which the penalty grows."""
    penalty: float = Field(default=1.0, gt=0, le=LARGEST_REWARD)
    """Penalty for a chain of rollout.max_total_tokens."""


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The optimiser, which updates weights from gradients."""

    name: Literal["adamw", "adamw_8bit", "adafactor", "lion", "muon", "sgd"] = "adamw"
    """adamw: torch's fused implementation. adamw_8bit and lion: need bitsandbytes on a GPU. muon: for the matrices
    within layers, with adamw for all other weights. fsdp2 supports only adamw and sgd."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of adamw, adamw_8bit and lion; the first is also the momentum of muon and sgd."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay; norms and biases, which have one dimension, do not decay."""


class TrainConfig(Section):
    """Training of the policy."""

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
        "gigpo",
        "raft",
        "distill",
        "sft",
    ] = "grpo"
    """Sets the defaults of `advantage`, `loss` and others; the recipe can change each of them. distill: on-policy
    distillation from the `teacher` alone. sft: supervised fine-tuning on conversations or saved rows."""
    steps: PositiveInt
    """Number of optimiser steps (SFT) or of batches of fresh groups."""
    batch_size: PositiveInt = 8
    """Groups, or rows (SFT), per step, over all processes."""
    updates_per_batch: PositiveInt = 1
    """Optimiser updates on each batch of groups."""
    advantage: AdvantageConfig = Field(default=AdvantageConfig(), validate_default=True)
    loss: LossConfig = Field(default=LossConfig(), validate_default=True)
    overlong: OverlongConfig | None = None
    """Penalise chains near rollout.max_total_tokens."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate of the policy after the warm-up; adapters need about ten times the rate of full training."""
    vision: Literal["frozen", "trained"] | PositiveFloat = "frozen"
    """Vision tower of a model that accepts images: frozen, or trained with the language model; a number trains it with
    that learning rate. With model.lora, a trained tower gets adapters."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning-rate schedule after the warm-up. linear and cosine would reach 0 one step after the last; wsd stays
    constant, then falls linearly over the last decay_steps, to 0 one step after the last."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps in which the learning rate rises linearly: the first uses 1/warmup_steps of it, the last all of
    it."""
    decay_steps: int = Field(default=0, ge=0)
    """wsd: length of the decay in steps."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to this norm."""
    batching: Literal["auto", "padded", "packed", "tree"] = "auto"
    """padded: one row per line; packed: rows end to end; tree: rows share common prefixes; auto: tree if it is exact
    with the model's attention, else padded."""
    token_budget: PositiveInt = 16384
    """Tokens (padding included) per micro-batch and process."""
    attention: Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2"] = "auto"
    """Attention implementation in the trainer; auto is transformers' choice, or on a GPU flex_attention for rows that
    share a line. The last two need a GPU."""
    gradient_checkpointing: Literal[False, True, "offload"] = False
    """Store only the inputs of layers, and recompute the rest in the backward pass. offload: store them in CPU
    memory."""
    liger: bool = False
    """Use the layer kernels of liger-kernel (GPU)."""
    compile: bool = False
    """Apply torch.compile to the backbone's layers."""
    precision: Precision = "auto"
    """Precision of products in linear layers. auto: model.dtype; fp8: 8 bits, one scale per tensor; fp8_rowwise: 8
    bits, one scale per row. FP8 needs torchao, and a GPU that has it; a CPU emulates it, slowly. See docs/placement.md.
    (Untested on a GPU so far.)"""
    from_trajectories: str | None = None
    """Train on saved groups (a JSONL file with its arrays beside it, or a folder of them), without worker or server."""
    min_reward: float | None = None
    """sft on from_trajectories: train only on chains with at least this reward (rejection sampling); null uses all that
    did not fail."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 writes one only at the end."""
    keep_last: PositiveInt | None = None
    """Number of newest checkpoints to keep; older ones are deleted. Null keeps all."""
    keep_best: str | None = "auto"
    """Metric whose best (highest) checkpoint is also kept. auto is eval/sampled/success, or eval/sampled/reward if
    tasks have no success. With an evaluation metric, each evaluation (eval.every) that is the best so far is followed
    by a checkpoint. null keeps no best checkpoint."""
    stop_when: list[Symptom] = []
    """End the run with the status `stopped` at the first of these symptoms, which are reported in any case.
    no_gradient: nothing to learn in 5 steps; entropy, mismatch: far from their earlier values; success: less than half
    its best; format: more turns that cannot be parsed, or fewer calls. success and unstable need tasks in random order.
    See docs/troubleshooting.md."""
    processes: PositiveInt = 1
    """Number of trainer processes; a launch with another number is refused."""
    strategy: Literal["single", "ddp", "fsdp2", "hsdp"] = "single"
    """Distribution of the work over processes: copies of the weights (ddp), shards (fsdp2), or shards within each
    machine and copies between several (hsdp). A launch that accelerate set up differently is refused."""

    @property
    def is_sharded(self) -> bool:
        return self.strategy in ("fsdp2", "hsdp")

    @property
    def has_critic(self) -> bool:
        return self.algorithm != "sft" and isinstance(self.advantage.options, GaeOptions)

    @property
    def critic(self) -> GaeOptions:
        """The options of the critic, for a recipe that has one."""
        assert isinstance(self.advantage.options, GaeOptions)
        return self.advantage.options

    @property
    def has_reference(self) -> bool:
        return self.algorithm != "sft" and self.loss.kl.coefficient > 0

    @property
    def trains_vision(self) -> bool:
        return self.vision != "frozen"

    @field_validator("advantage", "loss", mode="before")
    @classmethod
    def _apply_algorithm(cls, given: Any, info: ValidationInfo) -> Any:
        """Apply the algorithm's defaults to fields that the recipe leaves out."""
        if isinstance(given, Section):
            given = given.model_dump(mode="json", exclude_unset=True)
        if not isinstance(given, dict):
            return given
        section: type[Choice] = AdvantageConfig if info.field_name == "advantage" else LossConfig
        prefix = f"train.{info.field_name}."
        preset = ALGORITHMS.get(info.data.get("algorithm", ""), {})
        own = {name.removeprefix(prefix): value for name, value in preset.items() if name.startswith(prefix)}
        options = {key.removeprefix("options."): own.pop(key) for key in [*own] if key.startswith("options.")}
        fields = own | given
        chosen = fields.get(section.chooser, section.model_fields[section.chooser].default)
        kind = section.options_type(str(chosen))
        known = {} if kind is None else {name: value for name, value in options.items() if name in kind.model_fields}
        mine = fields.get("options")
        if known and (mine is None or isinstance(mine, dict)):
            fields["options"] = known | (mine or {})
        return fields


class TeacherConfig(Section):
    """A stronger model, or the policy with more in its context, that grades each token of the policy's chains
    (docs/teachers.md)."""

    model: str | None = None
    """Folder of a model or of a run's checkpoint, or hub name; it needs the policy's tokenizer. The base of
    `model.lora` (model.path) costs no further weights. Null: that at `url`, or the policy itself, with `context`."""
    url: str | None = None
    """Address of a server that has the teacher: vLLM, or `agentfactory serve`. The rollout worker asks it for
    log-probabilities while chains run, and the trainer loads no teacher."""
    api_key_env: str | None = None
    """Environment variable that contains the key of the server at `url`."""
    context: Annotated[str, _one_of(CONTEXTS)] | None = None
    """Self-distillation: a text that only the teacher reads, at the end of the task. solution: another chain of the
    group, which succeeded; answer: the row's `answer`; errors: of the chain's calls; or `FILE.py:NAME` of a function
    (trajectory, task, trajectories) that returns it. Chains without such a text are not graded."""
    divergence: Literal["sampled", "reverse_kl", "forward_kl", "jensen_shannon"] = "sampled"
    """sampled: reverse KL estimated from the sampled token, added to its advantage. The others are a term of the loss,
    exact over the vocabulary: reverse_kl: KL(policy || teacher); forward_kl: KL(teacher || policy); jensen_shannon:
    from the mean of both distributions (GKD with beta = 0.5)."""
    top_k: int | None = Field(default=None, ge=1)
    """Compute the divergence over the teacher's `top_k` most likely tokens, and the rest of the vocabulary as one more;
    null: over the vocabulary."""
    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the teacher beside the reward's advantages, which train.algorithm=distill omits."""

    def _faults(self) -> Iterator[Fault]:
        if self.model is None and self.url is None and self.context is None:
            fix = "name a stronger model, its server by teacher.url, or set teacher.context for self-distillation"
            yield "model", "missing: without it, the policy would teach itself", fix
        for other in ("model", "context"):
            if self.url is not None and (value := getattr(self, other)) is not None:
                yield "url", f"got {self.url!r} with {other}={value!r}", "remove one of them"
        if self.api_key_env is not None and self.url is None:
            yield "api_key_env", f"got {self.api_key_env!r} without url", "set teacher.url, or remove it"
        # an exact divergence is computed in the update
        if self.url is not None and self.is_exact:
            problem = f"null, and a server sends no whole distributions, which divergence={self.divergence} compares"
            yield "top_k", problem, "set teacher.top_k: 64, or divergence: sampled, or use teacher.model"
        if self.context is not None and self.is_exact:
            problem = f"got {self.divergence!r} with teacher.context, whose rows are scored before the update"
            yield "divergence", problem, "set teacher.top_k: 64, or use sampled"
        if self.top_k is not None and self.is_sampled:
            problem = f"got {self.top_k} with divergence=sampled, which compares the sampled tokens only"
            yield "top_k", problem, "set teacher.divergence to reverse_kl, or remove it"

    @property
    def is_sampled(self) -> bool:
        return self.divergence == "sampled"

    @property
    def is_exact(self) -> bool:
        """True if the divergence is computed over the whole vocabulary."""
        return not self.is_sampled and self.top_k is None

    @property
    def server(self) -> TeacherServer | None:
        """The server that the rollout worker asks; None if the trainer loads the teacher."""
        return None if self.url is None else TeacherServer(self.url, self.api_key_env, self.top_k)

    @property
    def stream(self) -> str | None:
        """The training rows' stream of the teacher's scores (see `Learner.score`); None if the divergence is exact."""
        return "teacher" if self.is_sampled else "teacher_top" if self.top_k is not None else None


class SyncConfig(Section):
    """Transfer of new weights to the inference server."""

    backend: Annotated[str, _one_of(("auto", "file", "lora", "nccl", "ipc"), "class")] = "auto"
    """lora: the adapter's files. file: full weights as safetensors, on a disk that the servers can read. nccl: full
    weights by broadcast between GPUs, to vLLM only. ipc: full weights through memory that trainer and server share, on
    one GPU (vLLM) or one machine's CPU (embedded). auto: lora if model.lora is set, ipc if both use one GPU, nccl if
    vLLM is started here on other GPUs and is installed in the trainer's Python too, else file.
    Or `FILE.py:NAME` of your own class (docs/add-a-sync-backend.md). (nccl: untested on a GPU so far.)"""
    options: Options = {}
    """Additional arguments for a FILE.py:NAME backend."""

    def _faults(self) -> Iterator[Fault]:
        if self.options and ".py:" not in self.backend:
            yield "options", f"got {self.options} with sync.backend={self.backend}", "remove it"


class PlacementConfig(Section):
    """The devices that the trainer and a server started by this run use."""

    mode: Literal["auto", "separate", "split", "time_share"] = "auto"
    """separate: different GPUs; split: one GPU, whose memory they share; time_share: one GPU used in turns; auto:
    separate if there are enough GPUs, else split if it fits, else time_share. Without a GPU, auto is separate: both are
    processes on the CPU."""
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of one GPU to plan for, in GiB; null uses the memory of the GPUs here. If set, the recipe's memory table
    is available and enforced on any machine."""
    on_misfit: Literal["refuse", "warn"] = "refuse"
    """Reaction if the recipe does not fit according to the memory table, some of whose values are assumptions: refuse
    it, or warn and try."""


class TrackConfig(Section):
    """Records for users to look at, in addition to metrics.jsonl."""

    trackers: list[Literal["wandb", "tensorboard", "trackio", "mlflow"]] = []
    """Experiment trackers that get the same metrics under the same names; install each under its own name. They take
    addresses, keys and projects from their own environment variables: see docs/tracking.md."""

    trajectories: int = Field(default=4, ge=0)
    """Chains per step, spread from the lowest to the highest reward, that trackers with tables (wandb, trackio, mlflow)
    get as text; wandb and trackio also get the images. 0: none."""

    def _faults(self) -> Iterator[Fault]:
        if len(set(self.trackers)) < len(self.trackers):
            yield "trackers", f"got {', '.join(self.trackers)}", "name each once"


ALGORITHMS: dict[str, dict[str, Any]] = {
    # DeepSeekMath (arXiv:2402.03300), with DAPO's normaliser: a chain of many turns should not count less per token
    "grpo": {},
    # arXiv:2503.20783
    "dr_grpo": {"train.advantage.options.scale": "none", "train.loss.normaliser": "constant"},
    # arXiv:2503.14476
    "dapo": {"train.loss.options.clip_high": 0.28, "rollout.equal_rewards": EqualRewards.REFILL},
    # arXiv:2507.18071, section 5.1
    "gspo": {
        "train.loss.policy": "gspo",
        "train.loss.options.clip_low": 3e-4,
        "train.loss.options.clip_high": 4e-4,
        "train.loss.normaliser": "sequence",
    },
    # MiniMax-M1 (arXiv:2506.13585)
    "cispo": {"train.loss.policy": "cispo", "train.loss.options.clip_high": 4.0},
    # arXiv:2511.20347
    "sapo": {"train.loss.policy": "sapo", "train.loss.normaliser": "sequence"},
    # arXiv:2402.14740
    "rloo": {"train.advantage.estimator": "rloo"},
    # arXiv:2501.03262
    "reinforce_pp": {"train.advantage.estimator": "reinforce_pp"},
    "reinforce_pp_baseline": {"train.advantage.estimator": "reinforce_pp_baseline"},
    # arXiv:1707.06347
    "ppo": {"train.advantage.estimator": "gae"},
    # arXiv:2505.10978, with the discount of its published code
    "gigpo": {"train.advantage.estimator": "gigpo", "train.advantage.options.gamma": 0.95},
    # arXiv:2304.06767
    "raft": {"train.advantage.estimator": "raft"},
    # Thinking Machines, 2025, "On-Policy Distillation"; GKD (arXiv:2306.13649) with an exact teacher.divergence
    "distill": {"train.advantage.estimator": "none"},
    "sft": {},
}
"""The defaults of each algorithm, by recipe field."""


class TrainRecipe(RolloutRecipe):
    """The recipe fields that the trainers package reads."""

    train: TrainConfig
    teacher: TeacherConfig | None = None
    sync: SyncConfig = SyncConfig()
    placement: PlacementConfig = PlacementConfig()
    track: TrackConfig = TrackConfig()

    @property
    def plans_for_a_gpu(self) -> bool:
        return self.placement.gpu_memory_gib is not None

    @property
    def rounding(self) -> dict[str, str]:
        """The fields, with their values, that make the server's weights differ from the trained ones by rounding: of
        the server's weights, or of the base below the trainer's adapter."""
        lora = self.model.lora
        fields = {
            "server.model": self.server.model,
            "server.quantization": self.server.quantization,
            "model.lora.quantization": lora.quantization if lora else None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def needs_rewards(self) -> bool:
        shows_success = self.teacher is not None and self.teacher.context == "solution"
        return self.train.advantage.estimator != "none" or shows_success

    @property
    def teacher_servers(self) -> dict[str, TeacherServer]:
        """The server that grades the chains of each source, by the source's name (see Part); empty without one."""
        server = None if self.teacher is None else self.teacher.server
        if server is None:
            return {}
        found = {}
        for section, data in sections(self.data, "data"):
            name, own = (data.name, data.teacher_url) if isinstance(data, SourceConfig) else ("", None)
            found[name] = server if own is None else replace(server, url=own, field=f"{section}.teacher_url")
        return found

    def _faults(self) -> Iterator[Fault]:
        yield from super()._faults()
        for index, source in enumerate([] if self.data is None else self.data.sources):
            if source.teacher_url is not None and (self.teacher is None or self.teacher.url is None):
                problem, fix = f"got {source.teacher_url!r} without teacher.url", "set teacher.url, for other sources"
                yield f"data.sources.{index}.teacher_url", problem, fix

    def _complete(self) -> None:
        super()._complete()
        # the algorithm's defaults outside of `train`; saved groups are not filtered
        for name, value in ALGORITHMS[self.train.algorithm].items():
            section, _, field = name.partition(".")
            in_rollout = section == "rollout" and not self.train.from_trajectories
            if in_rollout and field not in self.rollout.model_fields_set:
                setattr(self.rollout, field, value)

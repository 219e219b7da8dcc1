"""The part of a recipe that the rollout package owns: model, data, rewards, rollout, server, eval."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentfactory.rollout.trajectory import Outcome
from agentfactory.tools.config import Options, PositiveInt, Section, ToolsRecipe
from agentfactory.tools.errors import SettingError


class LoraConfig(Section):
    """A low-rank adapter on a frozen base (Hu et al., 2021, arXiv:2106.09685), made by peft."""

    rank: PositiveInt
    """Inner dimension of the two factors."""
    alpha: float | None = None
    """Scale of the adapter is alpha / rank; default 2 x rank."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the adapter's input while training."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Names of the linear modules that get an adapter."""
    quantization: Literal["nf4"] | None = None
    """QLoRA (arXiv:2305.14314): keep the base in four bits a weight while training; needs bitsandbytes, and one process
    or ddp."""


class ModelConfig(Section):
    """The policy's network, tokenizer and chat template."""

    path: str
    """Hub name or folder of a causal language model in the transformers format."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of the forward pass, in the trainer and in the server."""
    chat_template: str | None = None
    """File with a Jinja chat template to use in place of the tokenizer's own."""
    lora: LoraConfig | None = None
    """Train an adapter; null trains every weight."""


class DataConfig(Section):
    """Tasks: rows with `question` or `messages`, and any further fields, which reach tools and rewards by name."""

    path: str | None = None
    """A JSON, JSONL or parquet file, or the hub name of a dataset."""
    source: str | None = None
    """In place of path: `FILE.py:NAME` of a function, or class, that gives rows."""
    options: Options = {}
    """source: its arguments."""
    subset: str | None = None
    """Configuration of a hub dataset that has several."""
    split: str = "train"
    """Split of a hub dataset."""
    columns: dict[str, str] = {}
    """New name -> name in the file, such as {question: problem}."""
    shuffle: bool = True
    """Shuffle anew each epoch, from the recipe's seed."""
    limit: PositiveInt | None = None
    """Use only the first rows."""

    @property
    def file(self) -> Path | None:
        """The file of rows; None where they come from the hub or a source."""
        # what is not absolute is a hub name
        return Path(self.path) if self.path is not None and os.path.isabs(self.path) else None

    @model_validator(mode="after")
    def _has_one_origin(self) -> "DataConfig":
        if (self.path is None) == (self.source is None):
            got = "neither path nor source" if self.path is None else f"both path={self.path} and source={self.source}"
            raise SettingError(
                "", f"got {got}", "give one: path, a file of rows, or source, FILE.py:NAME (and null for the other)"
            )
        if self.options and self.source is None:
            raise SettingError("options", f"got {self.options} without source", "set it to null")
        if self.source is not None and (self.subset is not None or self.split != "train"):
            name = "split" if self.subset is None else "subset"
            raise SettingError(name, f"got {getattr(self, name)!r} with source: it is for the hub", "remove it")
        return self


class OutcomePolicy(StrEnum):
    """What becomes of a chain that ended with some outcome."""

    DROP = "drop"
    """Neither scored nor trained; its trajectory is kept in the run folder."""
    MASK = "mask"
    """Scored, and others are compared with it, but its own tokens are not trained."""
    KEEP = "keep"
    """Scored and trained as it stands; dropped where no reward can be computed."""
    RETRY = "retry"
    """Run again once, then dropped."""

    @property
    def scored(self) -> bool:
        """Whether the chain counts: it gets a reward, which baselines see."""
        return self in (OutcomePolicy.MASK, OutcomePolicy.KEEP)


class EqualRewards(StrEnum):
    """What becomes of a group whose chains all have the same reward: group-relative advantages are 0 there."""

    KEEP = "keep"
    """Delivered like any other."""
    DROP = "drop"
    """Not trained, and its place in the batch stays empty."""
    REFILL = "refill"
    """Not trained, and another task takes its place (dynamic sampling, DAPO, arXiv:2503.14476, section 3.2)."""


class CurriculumConfig(Section):
    """Tasks by the policy's success: those that teach little are visited less. A task's success rate is the mean
    `success` of its last group's chains, averaged with what the rate was before."""

    solved: float = Field(default=0.95, ge=0, le=1)
    """A task with at least this success rate is solved."""
    hopeless: float = Field(default=0.05, ge=0, le=1)
    """A task with at most this success rate is hopeless."""
    visit: float = Field(default=0.25, ge=0.01, le=1)
    """Probability that a solved or hopeless task is visited when it is its turn."""

    @model_validator(mode="after")
    def _tasks_are_left(self) -> "CurriculumConfig":
        if self.hopeless >= self.solved:
            raise ValueError(f"hopeless={self.hopeless} has to be less than solved={self.solved}")
        return self


class ContextConfig(Section):
    """What happens when a chain's context grows long. What follows is sampled in a new row, which shares the chain's
    advantage."""

    policy: Literal["keep", "truncate", "summarize"] = "keep"
    """keep: it grows until rollout.max_total_tokens ends the chain. truncate: old turns are left out of the new row.
    summarize: the model is asked for a summary, with which the new row begins; that is a turn, and trained."""
    max_tokens: PositiveInt | None = None
    """Length at which the policy acts; null is three quarters of rollout.max_total_tokens."""
    keep_turns: int = Field(default=2, ge=0)
    """Last turns, with what the tools answered, that stand in the new row."""
    prompt: str = "Summarize what was done and found so far, and what is left to do. You will go on from this summary."
    """How the model is asked for a summary."""


class RewardConfig(Section):
    """One reward of several, which are added up."""

    reward: str
    """`FILE.py:NAME` of a `@reward` function, or the name of a prebuilt one."""
    name: str | None = None
    """Under which its value is logged, as reward/<name>; null is its own name. Two rewards of one name need it."""
    weight: float = 1.0
    """Factor of what it returns."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Time limit of one verdict; then the chain is a reward_error."""
    options: dict[str, Any] = {}
    """Further arguments, by name; they go before fields of the data."""


class Inflight(StrEnum):
    """What becomes of a running turn's cache when the server gets new full weights."""

    RECOMPUTE = "recompute"
    """Computed again with the new weights: every token's log-probability is that of one version."""
    KEEP = "keep"
    """Kept, which is cheaper: what is sampled on such a cache is marked as mixed, and agrees with no version."""


class RolloutConfig(Section):
    """How chains are run."""

    group_size: PositiveInt = 8
    """Chains per task; advantages compare them with each other."""
    max_turns: PositiveInt = 8
    """Assistant turns per chain."""
    max_tokens: PositiveInt = 512
    """Sampled tokens per turn."""
    max_total_tokens: PositiveInt = 8192
    """Length of a row, prompt included (a chain has one, unless its template rewrites history or rollout.context
    shortens it); must not exceed the server's max_model_len."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by it too."""
    system_prompt: str | None = None
    """Put before each task's messages."""
    parser: str = "hermes"
    """How the model acts. Tool calls in the chat template's own format: hermes | qwen3_coder | llama3_json | pythonic;
    in plain text: react | code_block | tags; or `FILE.py:NAME` of a parser of one's own."""
    agent: str | None = None
    """`FILE.py:NAME` of an `Agent` class, made without arguments, that overrides `generate` or `parse`."""
    assistant_prefix: str = ""
    """Text with which each assistant turn is made to begin, such as `<think>`; it is context, and not trained.
    A summary of rollout.context is without."""
    context: ContextConfig = ContextConfig()
    """What happens when a chain's context grows long."""
    outcome_penalty: dict[Outcome, Annotated[float, Field(ge=0)]] = {}
    """How a chain ended -> what is taken off its reward, such as {max_turns: 0.5}."""
    concurrency: PositiveInt | Literal["auto"] = 64
    """Chains alive at a time; auto starts at server.max_num_seqs and, while training, follows the server's load. To run
    ahead, train.batch_size x group_size x (max_staleness + 1) of them must fit."""
    max_staleness: int = Field(default=0, ge=0)
    """How many updates old a trained token may be; 0 alternates generation and training."""
    inflight: Inflight = Inflight.RECOMPUTE
    """What becomes of the caches of running turns when full weights are updated: recompute | keep. An adapter's turns
    keep their adapter."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Time limit of one chain; scoring it may take as long again."""
    equal_rewards: EqualRewards = EqualRewards.KEEP
    """Groups whose chains all have the same reward: keep | drop | refill. With drop a batch has fewer groups, but one
    at least."""
    on_outcome: dict[Outcome, OutcomePolicy] = {}
    """How a chain ended -> drop | mask | keep | retry; failures are dropped and all else is kept unless it says
    otherwise. {max_tokens: mask, context_overflow: mask} trains no chain that was cut short. What has no reward cannot
    be trained: cancelled is only dropped, reward_error dropped or retried."""
    curriculum: CurriculumConfig | None = None
    """Visit solved and hopeless tasks less; null visits each task once an epoch."""

    @model_validator(mode="after")
    def _policies_can_work(self) -> "RolloutConfig":
        for outcome, policy in self.on_outcome.items():
            possible = _POSSIBLE.get(outcome, tuple(OutcomePolicy))
            if policy not in possible:
                raise ValueError(
                    f"on_outcome.{outcome}: got {policy}, and such a chain has no reward; use {' or '.join(possible)}"
                )
        if self.equal_rewards is not EqualRewards.KEEP and self.group_size == 1:
            raise ValueError(
                f"equal_rewards: got {self.equal_rewards} with group_size=1, where nothing is left; use keep"
            )
        return self

    def outcome_policy(self, outcome: Outcome) -> OutcomePolicy:
        """What becomes of a chain that ended so."""
        return self.on_outcome.get(outcome, OutcomePolicy.DROP if outcome.failed else OutcomePolicy.KEEP)

    @property
    def scored(self) -> frozenset[Outcome]:
        """The outcomes of chains that get a reward."""
        return frozenset(outcome for outcome in Outcome if self.outcome_policy(outcome).scored)


_POSSIBLE = {
    Outcome.REWARD_ERROR: (OutcomePolicy.DROP, OutcomePolicy.RETRY),
    # what the bound on staleness ended has no successor in its group
    Outcome.CANCELLED: (OutcomePolicy.DROP,),
}
"""What can become of chains that nothing can score; anything else of all others."""


EMBEDDED_QUANTIZATIONS = ("int8", "int4")
"""What the embedded engine rounds to: see rollout/embedded/quantization.py, which needs torch."""


class ServerConfig(Section):
    """The inference server: started by `agentfactory serve` and `agentfactory train`, or already running at `url`."""

    engine: Literal["vllm", "embedded"] = "vllm"
    """vllm, or the embedded engine: one small decode loop for a CPU or one GPU."""
    python: str | None = None
    """Python to run vLLM with, such as .venv-vllm/bin/python; null is the one that runs this. AgentFactory must be
    installed there too, `pip install --no-deps .` is enough."""
    url: str | list[str] | None = None
    """Address of a server that is already running, or a list of several; null starts one."""
    retry_seconds: float = Field(default=300.0, gt=0)
    """How long what can heal is tried again: a server that is gone, 5xx, 429. Then a request fails, and where no
    server completed any, the run stops."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    model: str | None = None
    """Served in place of `model.path`: a quantised copy of the same model, such as an AWQ or GPTQ checkpoint, for an
    adapter. Null serves `model.path`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key; the key itself is never stored."""
    max_model_len: PositiveInt = 8192
    """Longest sequence, prompt included."""
    max_num_seqs: PositiveInt = 128
    """Sequences decoded together."""
    max_loras: PositiveInt = 4
    """Adapters held at a time."""
    tensor_parallel_size: PositiveInt = 1
    """vLLM: devices that share each layer."""
    data_parallel_size: PositiveInt = 1
    """vLLM: copies of the model."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """vLLM: share of a GPU's memory, or of a CPU machine's, to use; null is what `placement` leaves, or vLLM's default,
    on a CPU 1 GiB of cache."""
    quantization: str | None = None
    """How the served base model is quantised. vLLM: fp8, awq, gptq (bitsandbytes: by a plugin). embedded: int8 or int4,
    which rounds weights and saves no memory: for trials of what rounding does to learning."""
    args: list[str] = []
    """Further command-line flags for vLLM, as they are."""
    startup_seconds: float = Field(default=600.0, gt=0)
    """How long the server may take to answer."""

    @property
    def urls(self) -> list[str]:
        """The addresses in `url`."""
        return [self.url] if isinstance(self.url, str) else self.url or []

    def vllm_only(self) -> dict[str, object]:
        """Fields that only vLLM heeds, as far as they are set."""
        names = (
            "python",
            "tensor_parallel_size",
            "data_parallel_size",
            "gpu_memory_utilization",
            "args",
        )
        return {
            name: value for name in names if (value := getattr(self, name)) != type(self).model_fields[name].default
        }

    def quantization_fault(self) -> tuple[str, str] | None:
        """Problem and fix of a `quantization` that the engine cannot do to the weights that it serves."""
        asked, is_embedded = self.quantization, self.engine == "embedded"
        if asked is None or is_embedded == (asked in EMBEDDED_QUANTIZATIONS):
            return None
        if is_embedded:
            problem = f"got {asked!r}, and the embedded engine rounds to {' or '.join(EMBEDDED_QUANTIZATIONS)}"
            return problem, "use one of these, or set server.engine=vllm"
        problem = f"got {asked!r}, which only the embedded engine knows"
        return problem, "use fp8, awq or gptq, or set server.engine=embedded"


class EvalConfig(Section):
    """Evaluation on held-out tasks: before training, after it, and every `every` steps."""

    data: DataConfig | None = None
    """Held-out tasks; null evaluates nothing."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before and after."""
    samples: PositiveInt = 1
    """Sampled chains per task."""
    greedy: bool = True
    """Also one chain per task at temperature 0."""
    request: dict[str, Any] = {}
    """Fields of each request to a chat endpoint (`agentfactory eval --url`) beside or in place of ours; null leaves one
    out, such as {max_tokens: null, max_completion_tokens: 512}."""


class RolloutRecipe(ToolsRecipe):
    """The recipe fields that the rollout package reads."""

    seed: int = Field(default=0, ge=0)
    """Seed of data order, weights and sampling."""
    model: ModelConfig
    data: DataConfig | None = None
    rewards: list[RewardConfig] = []
    """`@reward` functions, added up; a name alone stands for {reward: NAME}. Empty: the environment's own reward."""
    rollout: RolloutConfig = RolloutConfig()
    server: ServerConfig = ServerConfig()
    eval: EvalConfig = EvalConfig()

    @field_validator("rewards", mode="before")
    @classmethod
    def _name_alone(cls, rewards: Any) -> Any:
        if not isinstance(rewards, list):
            return rewards
        return [{"reward": entry} if isinstance(entry, str) else entry for entry in rewards]

    def with_model(self, path: str) -> Self:
        """The same for the model at `path`."""
        return self.model_copy(update={"model": self.model.model_copy(update={"path": path})})

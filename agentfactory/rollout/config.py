"""Recipe sections of the rollout package: model, data, rewards, rollout and eval. See `server_config` for server."""

import os
from abc import abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from agentfactory.rollout.server_config import ServerConfig
from agentfactory.rollout.trajectory import Outcome
from agentfactory.tools.config import Choice, NoOptions, Options, PositiveInt, Section, ToolsRecipe, TypedOptions
from agentfactory.tools.errors import SettingError
from agentfactory.tools.processes.precision import fastest_dtype
from agentfactory.tools.sandbox.limits import ProgramLimits, SandboxKind
from agentfactory.tools.user_code.entry_points import SOURCES, load_named, registered


class LoraConfig(Section):
    """A low-rank adapter (LoRA, Hu et al., 2021, arXiv:2106.09685) on a frozen base, created with peft. Training can
    continue an adapter: that of the stage before, or of `from`. Fields that are left out then have its values."""

    model_config = ConfigDict(serialize_by_alias=True)

    rank: PositiveInt
    """Inner dimension of the two factors. Required for a new adapter."""
    alpha: float | None = None
    """The adapter's output is scaled by alpha / rank. Null: 2 x rank."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the adapter's input during training; for train.algorithm=sft only."""
    target_modules: str | list[str] = "all-linear"
    """Linear modules that get an adapter: all-linear, a list of names, or a regular expression that matches full module
    names. In a multimodal model, all-linear covers only the language model, unless train.vision is trained."""
    trainable_tokens: Literal["auto"] | list[str] | None = None
    """Tokens whose rows of head and embedding are trained, too. auto: the tokens of the format that the network cannot
    tell from others, because they were never trained. Null: none; such tokens are then refused."""
    quantization: Literal["nf4"] | None = None
    """QLoRA (arXiv:2305.14314): store the base model at four bits per weight during training. Needs bitsandbytes, and
    either a single process or ddp."""
    from_: str | None = Field(default=None, alias="from")
    """Adapter to continue: a folder written by peft, or a checkpoint of another run that trained an adapter on
    `model.path`. A later stage continues the adapter of the stage before."""
    merge: bool | None = None
    """Merge the adapter of `from` or of the stage before into the base first, and train a new one. Null: only if they
    differ in rank, alpha or target_modules."""


class ModelConfig(Section):
    """The policy's network, tokenizer and chat template."""

    path: str
    """Hub name or folder of a causal language model in the transformers format."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of the forward pass in the trainer and the server. auto: bfloat16 if this machine computes faster with
    it, which is measured in milliseconds, else float32; the recipe of the run has the result."""
    chat_template: str | None = None
    """File with a Jinja chat template, used instead of the tokenizer's own."""
    lora: LoraConfig | None = None
    """Train an adapter. Null: train every weight."""
    min_image_pixels: PositiveInt | None = None
    """Smallest area of an image, in pixels; smaller images are enlarged. Null: the default of the model's processor."""
    max_image_pixels: PositiveInt | None = None
    """Largest area of an image, in pixels; larger images are reduced. Each block of 28 x 28 (Qwen2.5-VL, GLM-4.1V) or
    32 x 32 pixels (Qwen3-VL) becomes one token. Processors that cut images into tiles may enlarge them again. Null: the
    default of the model's processor."""

    @field_validator("dtype")
    @classmethod
    def _measure(cls, dtype: str) -> str:
        return fastest_dtype() if dtype == "auto" else dtype


class TaskSource(Section):
    """Base class of task sources that packages register under the entry point `agentfactory.sources`. A recipe sets the
    source's fields below `data.NAME`."""

    paths: ClassVar[tuple[str, ...]] = ()
    """Fields that contain paths, which a recipe gives relative to its own file: dotted names; `*` stands for each
    entry, "" for a value given in place of the section."""
    world: ClassVar[str | None] = None
    """Name of the world that plays the tasks. Recipes that use the source have it among their tools."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return the tasks. Raise SettingError, with the field's name, if a field is invalid."""


def source_of(name: str) -> type[TaskSource] | None:
    """Return the class of the source registered as `name`, or None."""
    place = registered(SOURCES).get(name)
    if place is None:
        return None
    found: type[TaskSource] = load_named(place)
    return found


class DataConfig(Section):
    """Tasks: rows with `question` or `messages`. Other fields are passed to tools and rewards by name. The `images` of
    a row (paths relative to the file, bytes, base64) replace the `<image>` markers in its text; without markers they
    open its first user message. Messages in the OpenAI format may also contain image parts. The section of a registered
    source can replace path."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    path: str | None = None
    """A file .jsonl, .json, .csv (each also as .gz) or .parquet, or the hub name of a dataset."""
    source: str | None = None
    """Alternative to path: `FILE.py:NAME` of a function or class that returns rows."""
    options: Options = {}
    """Arguments for source."""
    subset: str | None = None
    """Configuration name of a hub dataset that has several."""
    split: str = "train"
    """Split of a hub dataset."""
    columns: dict[str, str] = {}
    """Columns to rename: new name -> name in the file, such as {question: problem}. A dotted name copies a nested
    field."""
    shuffle: bool = True
    """Reshuffle the rows each epoch, using the recipe's seed."""
    limit: PositiveInt | None = None
    """Use only this many rows, from the start of the data."""

    @property
    def file(self) -> Path | None:
        """The file with the rows; None if they come from the hub or a source."""
        # file paths are absolute by now: a relative path is a hub name
        return Path(self.path) if self.path is not None and os.path.isabs(self.path) else None

    @property
    def registered(self) -> tuple[str, TaskSource] | None:
        """The name and section of the registered source; None if path or source gives the rows."""
        return next(iter((self.model_extra or {}).items()), None)

    @property
    def world(self) -> str | None:
        """The name of the world that plays the tasks; None if the recipe's tools do."""
        return None if self.registered is None else self.registered[1].world

    @model_validator(mode="before")
    @classmethod
    def _load_registered(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if hidden := sorted(registered(SOURCES).keys() & cls.model_fields):
            problem = f"an installed package registers the source {hidden[0]!r}, which is already a field of data"
            raise SettingError("", problem, f"uninstall {registered(SOURCES)[hidden[0]]}, or rename its source")
        found, errors = dict(given), []
        for name in [key for key in given if key not in cls.model_fields]:
            kind, value = source_of(name), found.pop(name)
            if kind is None:
                errors.append(InitErrorDetails(type="extra_forbidden", loc=(name,), input=value))
            elif value is not None:
                try:
                    found[name] = kind.model_validate(value)
                except ValidationError as error:
                    for each in error.errors():
                        at = {"loc": (name, *each["loc"]), "input": each["input"], "ctx": each.get("ctx", {})}
                        errors.append(InitErrorDetails(type=each["type"], **at))  # type: ignore[typeddict-item]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return found

    @model_validator(mode="after")
    def _has_one_origin(self) -> "DataConfig":
        given = {name: value for name in ("path", "source") if (value := getattr(self, name)) is not None}
        given |= self.model_extra or {}
        if len(given) != 1:
            others = registered(SOURCES)
            *first, last = ["path", "source", *others]
            got = " and ".join(f"{name}={value}" for name, value in given.items()) or f"no {', '.join(first)} or {last}"
            fix = f"set one: path (a file of rows), source (FILE.py:NAME) or {' or '.join(others)}; null for the others"
            raise SettingError("", f"got {got}", fix)
        (origin,) = given
        if self.options and self.source is None:
            raise SettingError("options", f"got {self.options} without source", "set it to null")
        if self.path is None and (self.subset is not None or self.split != "train"):
            name = "split" if self.subset is None else "subset"
            raise SettingError(name, f"got {getattr(self, name)!r} with {origin}; it is for hub datasets", "remove it")
        return self


class OutcomePolicy(StrEnum):
    """The treatment of a chain, chosen by its outcome."""

    DROP = "drop"
    """Neither score nor train the chain; its trajectory stays in the run folder."""
    MASK = "mask"
    """Score the chain and count its reward in the baseline, but do not train its tokens."""
    KEEP = "keep"
    """Score and train the chain; drop it if no reward can be computed."""
    RETRY = "retry"
    """Run the chain once more; drop it if the second run ends in an outcome of this kind too."""

    @property
    def scored(self) -> bool:
        """True if the chain gets a reward, which baselines include."""
        return self in (OutcomePolicy.MASK, OutcomePolicy.KEEP)


class EqualRewards(StrEnum):
    """The treatment of a group whose chains all have the same reward, so that group-relative advantages are 0."""

    KEEP = "keep"
    """Deliver the group like any other."""
    DROP = "drop"
    """Do not train the group; its place in the batch stays empty."""
    REFILL = "refill"
    """Replace the group by one of another task (dynamic sampling, DAPO, arXiv:2503.14476, section 3.2)."""


class CurriculumConfig(Section):
    """A curriculum that visits solved and hopeless tasks less often. A task's success rate is the mean `success` of its
    last group's chains, averaged with the previous rate."""

    solved: float = Field(default=0.95, ge=0, le=1)
    """A task with at least this success rate is solved."""
    hopeless: float = Field(default=0.05, ge=0, le=1)
    """A task with at most this success rate is hopeless."""
    visit: float = Field(default=0.25, ge=0.01, le=1)
    """Probability of visiting a solved or hopeless task when it comes up."""

    @model_validator(mode="after")
    def _tasks_are_left(self) -> "CurriculumConfig":
        if self.hopeless >= self.solved:
            raise ValueError(f"hopeless={self.hopeless} must be less than solved={self.solved}")
        return self


class TruncateOptions(Section):
    """Options of `rollout.context` with `policy: truncate`."""

    max_tokens: PositiveInt | None = None
    """Context length that triggers the policy. Null: three quarters of rollout.max_total_tokens."""
    keep_turns: int = Field(default=2, ge=0)
    """Number of most recent turns, with their tool results, to keep in the new row."""


class SummarizeOptions(TruncateOptions):
    """Options of `rollout.context` with `policy: summarize`."""

    prompt: str = "Summarize what was done and found so far, and what is left to do. You will go on from this summary."
    """Prompt that asks the model for a summary."""


class ContextConfig(Choice):
    """Handling of a chain whose context grows long. Later turns are sampled in a new row, which shares the chain's
    advantage."""

    chooser = "policy"
    kinds = {"truncate": TruncateOptions, "summarize": SummarizeOptions}

    policy: Literal["keep", "truncate", "summarize"] = "keep"
    """keep: the context grows until rollout.max_total_tokens ends the chain. truncate: the new row drops old turns.
    summarize: the model writes a summary, which opens the new row; the summary is a turn and is trained."""
    options: TypedOptions = None
    """Options of the policy."""
    keep_images: PositiveInt | None = None
    """Maximum number of images in a row, under any policy. When a tool result exceeds it, a new row starts without the
    oldest turns that have images; the opening messages and the last turn always stay. Null: no limit."""


class RewardConfig(Section):
    """A reward function; several are summed."""

    reward: str
    """`FILE.py:NAME` of a `@reward` function, or the name of a prebuilt reward."""
    name: str | None = None
    """Name under which the value is logged, as reward/<name>. Null: the reward's own name. Required if two rewards have
    the same name."""
    weight: float = 1.0
    """Factor applied to the returned value."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Time limit for one call; a chain that exceeds it ends as reward_error."""
    options: dict[str, Any] = {}
    """Additional keyword arguments; they take precedence over fields of the data."""


class ProgramOptions(Section):
    """Options of `rollout.agent.command`, which runs a program as the agent."""

    env: dict[str, str] = {}
    """Additional environment variables of the program, with `${task.FIELD}`, `${chain}`, and `${NAME}` for a variable
    of this process. By default it gets only PATH and a few others, with the chain's folder as HOME."""
    workspace: str | None = None
    """Folder to copy into each chain's folder before the program starts."""
    files: str | None = None
    """Folder of the files that a row's `files` names in a list. They are copied into the chain's folder."""
    keep_workspaces: str | None = None
    """Folder to which the folders of ended chains are moved. Null: they are deleted."""
    sandbox: SandboxKind = SandboxKind.BUBBLEWRAP
    """bubblewrap: the program can read the machine's programs and libraries, the files named in command and its own
    folder; its only network access is the model. none: the program has all permissions of this process
    (docs/sandbox.md)."""
    readable: list[str] = []
    """In the sandbox: additional files and folders that the program may read."""
    processes: PositiveInt = 256
    """In the sandbox: maximum number of concurrent processes and threads of a chain."""
    memory_mb: PositiveInt = 4096
    """In the sandbox: total memory of a chain's processes, in MiB; `/tmp` may take the same amount in addition."""
    disk_mb: PositiveInt = 4096
    """In the sandbox: maximum total size of the files in a chain's folder, in MiB."""

    @model_validator(mode="after")
    def _limits_can_hold(self) -> "ProgramOptions":
        for field in ("readable", "processes", "memory_mb", "disk_mb"):
            # compare with defaults: a resolved recipe, which each process of a run reads, sets every field
            if self.sandbox is SandboxKind.NONE and getattr(self, field) != type(self).model_fields[field].default:
                raise SettingError(field, f"got {getattr(self, field)!r} with sandbox=none", "remove one of them")
        try:
            ProgramLimits(self.processes, self.memory_mb, self.disk_mb)
        except ValueError as error:
            field, _, problem = str(error).partition(": ")
            raise SettingError(field, problem, "change it") from None
        return self


class OutsideOptions(Section):
    """Options of the agent `outside`: external programs that fetch tasks over HTTP, from the routes `POST /tasks`,
    `/tools` and `/reward` beside the model's."""

    port: int = Field(default=0, ge=0, le=65535)
    """Loopback port that serves the tasks; 0 picks a free one. The log has the address."""
    token_env: str = "AGENTFACTORY_TOKEN"
    """Environment variable with the token that programs must present to fetch tasks."""
    fields: list[str] | None = None
    """Fields of a row to send to the programs. Null: the whole row."""


class AgentConfig(Choice):
    """The agent that runs the chains: a class or function given by name, a program started once per chain, or external
    programs. A plain string is short for {name: STRING}."""

    chooser = "name"
    kinds = {"command": ProgramOptions, "outside": OutsideOptions}

    name: str | None = None
    """`FILE.py:NAME` of an `Agent` class that overrides `generate` or `parse`, constructed without arguments, or of an
    async function that runs its own loop. `outside`: external programs that fetch tasks over HTTP."""
    command: list[str] = []
    """Alternative to name: a program and its arguments. `${task.FIELD}` stands for a field of the row, `${chain}` for
    the chain's folder, which is the working directory. The environment variables `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
    `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` point to the model."""
    options: TypedOptions = None
    """Options of command or outside."""

    @classmethod
    def choice(cls, fields: Mapping[str, Any]) -> str | None:
        """See Choice."""
        found = fields.get("name")
        return "command" if fields.get("command") else None if found is None else str(found)

    @classmethod
    def options_type(cls, choice: str) -> type[Section]:
        """See Choice."""
        return cls.kinds.get(choice, NoOptions)

    @property
    def outside(self) -> OutsideOptions | None:
        """The options of the agent `outside`; None for other agents."""
        return self.options if isinstance(self.options, OutsideOptions) else None

    @model_validator(mode="after")
    def _is_one_agent(self) -> "AgentConfig":
        if (self.name is None) == (not self.command):
            raise SettingError(
                "", "it must have either a name or a command", "set one of name and command, and the other to null"
            )
        if self.name is not None and self.name != "outside" and ".py:" not in self.name:
            raise SettingError("name", f"got {self.name!r}", "write FILE.py:NAME, or outside")
        return self


class Inflight(StrEnum):
    """The treatment of a running chain's KV cache when the server gets new full weights."""

    RECOMPUTE = "recompute"
    """Recompute the KV cache with the new weights, so that the logprob of each token belongs to one version."""
    KEEP = "keep"
    """Keep the KV cache, which is cheaper. Tokens sampled on it are marked as mixed and match no single version."""


class LateChains(StrEnum):
    """The treatment of a group that still has running chains when its first tokens reach `rollout.max_staleness`."""

    WAIT = "wait"
    """Wait for the group: every chain that was started is trained."""
    BASELINE = "baseline"
    """Train other groups meanwhile, and the late one when its chains have ended: all rewards count in its baseline, and
    tokens that are too old by then are not trained."""
    DROP = "drop"
    """Train the group without its running chains, and cancel them. The trained chains are then the fast ones."""


class RolloutConfig(Section):
    """Rollout settings: sampling, limits, context, agent and filters of chains."""

    group_size: PositiveInt = 8
    """Chains per task; group-relative advantages compare them."""
    max_turns: PositiveInt = 8
    """Maximum assistant turns per chain."""
    max_tokens: PositiveInt = 512
    """Maximum sampled tokens per turn."""
    max_total_tokens: PositiveInt = 8192
    """Maximum length of a row in tokens, prompt included; must not exceed the server's max_model_len. A chain has one
    row, unless its template rewrites history or rollout.context shortens it."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same value."""
    system_prompt: str | None = None
    """System prompt to insert before each task's messages."""
    parser: str = "auto"
    """Tool-call format. auto: the format of the chat template. Or a name: hermes | qwen3_coder | llama3_json | pythonic
    | deepseek_v3 | glm | harmony | kimi | mistral | ... (docs/tool-call-formats.md). Plain-text formats: react |
    code_block | tags. Or `FILE.py:NAME` of your own parser."""
    reasoning: Literal["auto", "keep", "drop", "template"] = "auto"
    """Treatment of the reasoning in earlier turns. keep: all turns stay as sampled, in one row. template: the chat
    template renders the history, and a new row starts wherever the history changes. drop: history has no reasoning.
    auto: keep if the template, or TRL's training variant of it, does; otherwise template."""
    agent: AgentConfig | None = None
    """The agent that runs the chains. Null: the built-in one, which calls the recipe's tools."""
    assistant_prefix: str = ""
    """Text that starts each assistant turn, such as `<think>`. It is context and is not trained. Summaries of
    rollout.context do not get it."""
    context: ContextConfig = ContextConfig()
    """Handling of a chain whose context grows long."""
    outcome_penalty: dict[Outcome, Annotated[float, Field(ge=0)]] = {}
    """Outcome -> amount subtracted from the chain's reward, such as {max_turns: 0.5}."""
    coordinates: Literal["auto", "pixels", "resized", "relative1000", "relative1"] = "auto"
    """Coordinate system of the model's points and boxes in images. Tasks give them in pixels of the file; tools and
    rewards convert. pixels: of the full-size image. resized: pixels of the image after the processor resized it.
    relative1000, relative1: 0 to 1000, or 0 to 1, along each side. auto: the convention of the model's family, resized
    for Qwen2.5-VL and relative1000 for Qwen2-VL, Qwen3-VL, Qwen3.5, GLM-4.xV and InternVL. `agentfactory doctor
    --coordinates` tests a model."""
    concurrency: PositiveInt | Literal["auto"] = 64
    """Number of concurrent chains. auto starts at server.max_num_seqs and, while training, follows the server's load.
    For generation to run ahead, it must be at least train.batch_size x group_size x (max_staleness + 1)."""
    workers: PositiveInt = 1
    """Number of rollout worker processes. Each runs an equal share of every batch, with its own tool servers;
    `concurrency`, `limits.calls_per_second` and pool capacities are totals over all workers. More than one helps if a
    worker saturates a core, from about 1,000 chains on."""
    max_staleness: int = Field(default=0, ge=0)
    """Maximum age of a trained token, in updates; 0 alternates generation and training."""
    late_chains: LateChains = LateChains.DROP
    """Treatment of a group with running chains when its first tokens reach max_staleness: wait | baseline | drop. wait:
    the next batch waits for it. baseline: other groups are trained meanwhile; when its chains have ended, all rewards
    count in its baseline, and tokens that are too old are not trained. drop: it is trained without these chains, so
    that fast chains are trained more often than slow ones. See docs/staleness.md."""
    inflight: Inflight = Inflight.RECOMPUTE
    """Treatment of the KV caches of running chains when full weights are updated: recompute | keep. With an adapter, a
    running turn keeps its adapter."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Time limit of one chain, from its reset to its last turn; scoring may take the same time in addition."""
    equal_rewards: EqualRewards = EqualRewards.KEEP
    """Treatment of groups whose chains all have the same reward: keep | drop | refill. With drop, a batch has fewer
    groups, but at least one."""
    on_outcome: dict[Outcome, OutcomePolicy] = {}
    """Outcome -> drop | mask | keep | retry. By default, failed chains are dropped and all others are kept.
    {max_tokens: mask, context_overflow: mask} excludes chains that were cut short from training. Chains without a
    reward cannot be trained: cancelled allows only drop, reward_error only drop or retry."""
    curriculum: CurriculumConfig | None = None
    """Visit solved and hopeless tasks less often. Null: visit each task once per epoch."""

    @field_validator("agent", mode="before")
    @classmethod
    def _name_alone(cls, agent: Any) -> Any:
        return {"name": agent} if isinstance(agent, str) else agent

    @field_serializer("agent", mode="wrap")
    def _as_name(self, agent: AgentConfig | None, plain: SerializerFunctionWrapHandler) -> Any:
        # the short form, which users write and which older runs contain
        return plain(agent) if agent is None or not isinstance(agent.options, NoOptions) else agent.name

    @model_validator(mode="after")
    def _policies_can_work(self) -> "RolloutConfig":
        for outcome, policy in self.on_outcome.items():
            possible = _POSSIBLE.get(outcome, tuple(OutcomePolicy))
            if policy not in possible:
                raise ValueError(
                    f"on_outcome.{outcome}: got {policy}, but such a chain has no reward; use {' or '.join(possible)}"
                )
        if self.equal_rewards is not EqualRewards.KEEP and self.group_size == 1:
            raise ValueError(
                f"equal_rewards: got {self.equal_rewards} with group_size=1, which would drop every group; use keep"
            )
        return self

    def outcome_policy(self, outcome: Outcome) -> OutcomePolicy:
        """Return the policy for chains with this outcome."""
        return self.on_outcome.get(outcome, OutcomePolicy.DROP if outcome.failed else OutcomePolicy.KEEP)

    @property
    def scored(self) -> frozenset[Outcome]:
        """The outcomes of chains that get a reward."""
        return frozenset(outcome for outcome in Outcome if self.outcome_policy(outcome).scored)


_POSSIBLE = {
    Outcome.REWARD_ERROR: (OutcomePolicy.DROP, OutcomePolicy.RETRY),
    # a chain that the staleness bound cancelled is not replaced
    Outcome.CANCELLED: (OutcomePolicy.DROP,),
}
"""Policies allowed for outcomes that cannot be scored; all other outcomes allow every policy."""


class EvalConfig(Section):
    """Evaluation on held-out tasks: before training, after it, and every `every` steps."""

    data: DataConfig | None = None
    """Held-out tasks. Null: no evaluation."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before and after training."""
    samples: PositiveInt = 1
    """Sampled chains per task."""
    greedy: bool = True
    """Also run one chain per task at temperature 0."""
    request: dict[str, Any] = {}
    """Fields to add to or override in each request to a chat endpoint (`agentfactory eval --url`); null removes a
    field, as in {max_tokens: null, max_completion_tokens: 512}."""


class RolloutRecipe(ToolsRecipe):
    """The recipe fields that the rollout package reads."""

    seed: int = Field(default=0, ge=0)
    """Seed of data order, weight initialization and sampling."""
    model: ModelConfig
    data: DataConfig | None = None
    rewards: list[RewardConfig] = []
    """`@reward` functions, summed. A plain string is short for {reward: STRING}. If empty, the environment's own reward
    is used."""
    rollout: RolloutConfig = RolloutConfig()
    server: ServerConfig = ServerConfig()
    eval: EvalConfig = EvalConfig()

    @field_validator("rewards", mode="before")
    @classmethod
    def _name_alone(cls, rewards: Any) -> Any:
        if not isinstance(rewards, list):
            return rewards
        return [{"reward": entry} if isinstance(entry, str) else entry for entry in rewards]

    @model_validator(mode="after")
    def _add_worlds(self) -> Self:
        modules = {server.module for server in self.mcp_servers.values()}
        for data in (self.data, self.eval.data):
            if data is not None and data.world is not None and data.world not in {*self.tools, *modules}:
                self.tools = [*self.tools, data.world]
        return self

    def longest_call(self) -> tuple[float, str]:
        """See ToolsRecipe: a reset may take as long as its chain."""
        return self.rollout.timeout_seconds, "rollout.timeout_seconds"

    @property
    def needs_rewards(self) -> bool:
        """True unless chains are useful without a reward: they then get 0."""
        return True

    @property
    def max_loras(self) -> int:
        """Number of adapters that the server must hold: the next one, and all that running turns may still use."""
        return max(4, self.rollout.max_staleness + 2)

    def with_model(self, path: str) -> Self:
        """Return a copy of the recipe with `path` as its model."""
        return self.model_copy(update={"model": self.model.model_copy(update={"path": path})})

"""The part of a recipe that the rollout package owns: model, data, rewards, rollout, eval; server: `server_config`."""

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
from agentfactory.tools.sandbox.limits import ProgramLimits, SandboxKind
from agentfactory.tools.user_code.entry_points import SOURCES, load_named, registered


class LoraConfig(Section):
    """A low-rank adapter (LoRA, Hu et al., 2021, arXiv:2106.09685) on a frozen base, created with peft."""

    rank: PositiveInt
    """Inner dimension of the two factors."""
    alpha: float | None = None
    """The adapter is scaled by alpha / rank; the default is 2 x rank."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the adapter's input during training; for train.algorithm=sft only."""
    target_modules: str | list[str] = "all-linear"
    """Linear modules that get an adapter: all-linear, a list of names, or a regular expression that matches their whole
    names. For a model that sees, all-linear is those of its language model, unless train.vision is trained."""
    quantization: Literal["nf4"] | None = None
    """QLoRA (arXiv:2305.14314): store the base at four bits per weight during training. Needs bitsandbytes, and either
    a single process or ddp."""


class ModelConfig(Section):
    """The policy's network, tokenizer and chat template."""

    path: str
    """Hub name or folder of a causal language model in the transformers format."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of the forward pass in the trainer and the server."""
    chat_template: str | None = None
    """File with a Jinja chat template, used instead of the tokenizer's own."""
    lora: LoraConfig | None = None
    """Train an adapter; null trains every weight."""
    min_image_pixels: PositiveInt | None = None
    """Smallest area of an image, in pixels; the model gets smaller ones enlarged. Null: as its own processor does."""
    max_image_pixels: PositiveInt | None = None
    """Largest area of an image, in pixels; the model gets larger ones reduced, and each block of 28 x 28 (Qwen2.5-VL,
    GLM-4.1V) or 32 x 32 pixels (Qwen3-VL) is a token. Processors that cut images into tiles may enlarge them again.
    Null: as its own processor does."""


class TaskSource(Section):
    """Base of sources of tasks that a package registers by the entry point `agentfactory.sources`. A recipe gives its
    fields below `data.NAME`."""

    paths: ClassVar[tuple[str, ...]] = ()
    """Fields with paths, which a recipe gives relative to its own file: dotted names, `*` for each entry, "" for a
    value that stands for the whole section."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return the tasks. Raises SettingError about one of the fields."""


def source_of(name: str) -> type[TaskSource] | None:
    """Return the source that is registered as `data.NAME`; None if there is none."""
    place = registered(SOURCES).get(name)
    if place is None:
        return None
    found: type[TaskSource] = load_named(place)
    return found


class DataConfig(Section):
    """Tasks: rows with `question` or `messages`. Any other fields are passed to tools and rewards by name. The `images`
    of a row (paths relative to the file, bytes, base64) stand where its text says `<image>`, or else come first in its
    first user message; messages in the OpenAI format may have image parts too. Instead of path, the section of a
    registered source may stand here."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    path: str | None = None
    """A JSON, JSONL or parquet file, or the hub name of a dataset."""
    source: str | None = None
    """Used instead of path: `FILE.py:NAME` of a function or class that returns rows."""
    options: Options = {}
    """Arguments for source."""
    subset: str | None = None
    """Configuration name, for a hub dataset that has several."""
    split: str = "train"
    """Split of a hub dataset."""
    columns: dict[str, str] = {}
    """Renames columns: new name -> name in the file, such as {question: problem}."""
    shuffle: bool = True
    """Reshuffle the rows each epoch, using the recipe's seed."""
    limit: PositiveInt | None = None
    """Use only this many rows, from the start of the data."""

    @property
    def file(self) -> Path | None:
        """The file of rows; None if the rows come from the hub or a source."""
        # a path that is not absolute is a hub name
        return Path(self.path) if self.path is not None and os.path.isabs(self.path) else None

    @property
    def registered(self) -> tuple[str, TaskSource] | None:
        """The name and the section of a registered source; None if the rows come from elsewhere."""
        return next(iter((self.model_extra or {}).items()), None)

    @model_validator(mode="before")
    @classmethod
    def _load_registered(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if hidden := sorted(registered(SOURCES).keys() & cls.model_fields):
            problem = f"an installed package registers the source {hidden[0]!r}, which is a field of data"
            raise SettingError("", problem, f"uninstall {registered(SOURCES)[hidden[0]]}, or rename it there")
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
            fix = (
                f"give one: path, a file of rows, source, FILE.py:NAME, or {' or '.join(others)} (null for the others)"
            )
            raise SettingError("", f"got {got}", fix)
        (origin,) = given
        if self.options and self.source is None:
            raise SettingError("options", f"got {self.options} without source", "set it to null")
        if self.path is None and (self.subset is not None or self.split != "train"):
            name = "split" if self.subset is None else "subset"
            raise SettingError(name, f"got {getattr(self, name)!r} with {origin}: it is for the hub", "remove it")
        return self


class OutcomePolicy(StrEnum):
    """What to do with a chain, given its outcome."""

    DROP = "drop"
    """Neither score nor train the chain; its trajectory stays in the run folder."""
    MASK = "mask"
    """Score the chain and compare others with it, but do not train its tokens."""
    KEEP = "keep"
    """Score and train the chain as it is; drop it if no reward can be computed."""
    RETRY = "retry"
    """Run the chain once more, then drop it."""

    @property
    def scored(self) -> bool:
        """Whether the chain counts: it gets a reward, which baselines include."""
        return self in (OutcomePolicy.MASK, OutcomePolicy.KEEP)


class EqualRewards(StrEnum):
    """What to do with a group whose chains all have the same reward, which makes group-relative advantages 0."""

    KEEP = "keep"
    """Delivered like any other."""
    DROP = "drop"
    """Not trained, and its place in the batch stays empty."""
    REFILL = "refill"
    """Not trained, and another task takes its place (dynamic sampling, DAPO, arXiv:2503.14476, section 3.2)."""


class CurriculumConfig(Section):
    """Visits tasks according to the policy's success, so that those that teach little come up less often. A task's
    success rate is the mean `success` of its last group's chains, averaged with the previous rate."""

    solved: float = Field(default=0.95, ge=0, le=1)
    """A task with at least this success rate is solved."""
    hopeless: float = Field(default=0.05, ge=0, le=1)
    """A task with at most this success rate is hopeless."""
    visit: float = Field(default=0.25, ge=0.01, le=1)
    """Probability that a solved or hopeless task is visited when its turn comes."""

    @model_validator(mode="after")
    def _tasks_are_left(self) -> "CurriculumConfig":
        if self.hopeless >= self.solved:
            raise ValueError(f"hopeless={self.hopeless} has to be less than solved={self.solved}")
        return self


class TruncateOptions(Section):
    """Options of `rollout.context` with `policy: truncate`."""

    max_tokens: PositiveInt | None = None
    """Context length that triggers the policy; null means three quarters of rollout.max_total_tokens."""
    keep_turns: int = Field(default=2, ge=0)
    """Number of last turns, with their tool results, to keep in the new row."""


class SummarizeOptions(TruncateOptions):
    """Options of `rollout.context` with `policy: summarize`."""

    prompt: str = "Summarize what was done and found so far, and what is left to do. You will go on from this summary."
    """Prompt that asks the model for a summary."""


class ContextConfig(Choice):
    """How a chain continues when its context grows long. The turns that follow are sampled in a new row, which shares
    the chain's advantage."""

    chooser = "policy"
    kinds = {"truncate": TruncateOptions, "summarize": SummarizeOptions}

    policy: Literal["keep", "truncate", "summarize"] = "keep"
    """keep: the context grows until rollout.max_total_tokens ends the chain. truncate: the new row leaves out old
    turns. summarize: the model writes a summary, which opens the new row; the summary is a turn and is trained."""
    options: TypedOptions = None
    """Options of the policy."""
    keep_images: PositiveInt | None = None
    """Most images in a row, under any policy: when a tool's result exceeds it, a new row begins without the oldest
    turns that have images. The opening messages and the last turn always stay. Null: no limit."""


class RewardConfig(Section):
    """One reward; if there are several, they are added up."""

    reward: str
    """`FILE.py:NAME` of a `@reward` function, or the name of a prebuilt reward."""
    name: str | None = None
    """Name under which the value is logged, as reward/<name>; null uses the reward's own name. Two rewards with the
    same name need it."""
    weight: float = 1.0
    """Factor applied to the returned value."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Time limit for one call; a chain that exceeds it ends as reward_error."""
    options: dict[str, Any] = {}
    """Further arguments, by name; they take precedence over fields of the data."""


class ProgramOptions(Section):
    """Options of `rollout.agent.command`, a program as an agent."""

    env: dict[str, str] = {}
    """Further environment variables of the program, with `${task.FIELD}`, `${chain}`, and `${NAME}` for a variable of
    this process. It gets only PATH and a few others by default, and the chain's folder as HOME."""
    workspace: str | None = None
    """Folder that is copied into each chain's folder before the program starts."""
    keep_workspaces: str | None = None
    """Folder into which the folders of ended chains are moved; null: they are removed."""
    sandbox: SandboxKind = SandboxKind.BUBBLEWRAP
    """bubblewrap: the program sees the machine's programs and libraries, what command names and its folder, and reaches
    the model and nothing else. none: it may do whatever this process may (docs/sandbox.md)."""
    readable: list[str] = []
    """In the sandbox: further files and folders that the program may read."""
    processes: PositiveInt = 256
    """In the sandbox: processes and threads of a chain at a time."""
    memory_mb: PositiveInt = 4096
    """In the sandbox: memory of a chain's processes together, in MiB; `/tmp` may take the same again."""
    disk_mb: PositiveInt = 4096
    """In the sandbox: size of the files in a chain's folder, in MiB."""

    @model_validator(mode="after")
    def _limits_can_hold(self) -> "ProgramOptions":
        for field in ("readable", "processes", "memory_mb", "disk_mb"):
            # a recipe that was written and read again, as each process of a run reads it, has every field
            if self.sandbox is SandboxKind.NONE and getattr(self, field) != type(self).model_fields[field].default:
                raise SettingError(field, f"got {getattr(self, field)!r} with sandbox=none", "remove one of them")
        try:
            ProgramLimits(self.processes, self.memory_mb, self.disk_mb)
        except ValueError as error:
            field, _, problem = str(error).partition(": ")
            raise SettingError(field, problem, "change it") from None
        return self


class OutsideOptions(Section):
    """Options of the agent `outside`: programs elsewhere that take tasks by HTTP, with `POST /tasks`, `/tools` and
    `/reward` beside the model's routes."""

    port: int = Field(default=0, ge=0, le=65535)
    """Loopback port at which tasks are given; 0 picks a free one. The log has the address."""
    token_env: str = "AGENTFACTORY_TOKEN"
    """Environment variable that contains the token for which tasks are given."""
    fields: list[str] | None = None
    """The fields of a row that programs get; null gives the whole row."""


class AgentConfig(Choice):
    """The agent that plays the chains: a class or a function by name, a program, which is a process for each chain, or
    programs elsewhere. A name alone stands for {name: NAME}."""

    chooser = "name"
    kinds = {"command": ProgramOptions, "outside": OutsideOptions}

    name: str | None = None
    """`FILE.py:NAME` of an `Agent` class that overrides `generate` or `parse`, created without arguments; or of an
    async function with a loop of its own. `outside`: programs elsewhere, which take tasks by HTTP."""
    command: list[str] = []
    """Instead of name: a program and its arguments. `${task.FIELD}` stands for a field of the row, `${chain}` for the
    chain's folder, in which it starts. `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and
    `ANTHROPIC_API_KEY` in its environment name the model."""
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
        """The options of programs elsewhere; None for another agent."""
        return self.options if isinstance(self.options, OutsideOptions) else None

    @model_validator(mode="after")
    def _is_one_agent(self) -> "AgentConfig":
        if (self.name is None) == (not self.command):
            raise SettingError(
                "", "it has to be a name or a command", "set one of name and command, and the other to null"
            )
        if self.name is not None and self.name != "outside" and ".py:" not in self.name:
            raise SettingError("name", f"got {self.name!r}", "write FILE.py:NAME, or outside")
        return self


class Inflight(StrEnum):
    """What happens to the cache of a running chain when the server gets new full weights."""

    RECOMPUTE = "recompute"
    """The cache is recomputed with the new weights, so that the log-probability of each token belongs to one
    version."""
    KEEP = "keep"
    """The cache is kept, which is cheaper. Tokens sampled on it are marked as mixed and match no single version."""


class RolloutConfig(Section):
    """How chains run."""

    group_size: PositiveInt = 8
    """Chains per task; advantages compare them with each other."""
    max_turns: PositiveInt = 8
    """Maximum assistant turns per chain."""
    max_tokens: PositiveInt = 512
    """Maximum sampled tokens per turn."""
    max_total_tokens: PositiveInt = 8192
    """Maximum length of a row, prompt included; must not exceed the server's max_model_len. A chain has one row, unless
    its template rewrites history or rollout.context shortens it."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same value."""
    system_prompt: str | None = None
    """System prompt, inserted before each task's messages."""
    parser: str = "auto"
    """Tool-call format. auto: the one that the chat template writes, or its name: hermes | qwen3_coder | llama3_json |
    pythonic | deepseek_v3 | glm | harmony | kimi | mistral | ... (docs/tool-call-formats.md). Plain-text formats: react
    | code_block | tags. Or `FILE.py:NAME` of your own parser."""
    reasoning: Literal["auto", "keep", "drop", "template"] = "auto"
    """What becomes of the reasoning of earlier turns. keep: all turns stay as they were sampled, in one row. template:
    history is as the model's chat template has it, with a new row wherever it changes. drop: history has no reasoning.
    auto: keep if the template, or TRL's training variant of it, does; otherwise template."""
    agent: AgentConfig | None = None
    """The agent that plays the chains. Null: ours, which calls the recipe's tools."""
    assistant_prefix: str = ""
    """Text that starts each assistant turn, such as `<think>`. It is context and is not trained. Summaries of
    rollout.context do not get it."""
    context: ContextConfig = ContextConfig()
    """How a chain continues when its context grows long."""
    outcome_penalty: dict[Outcome, Annotated[float, Field(ge=0)]] = {}
    """Outcome -> amount subtracted from the chain's reward, such as {max_turns: 0.5}."""
    coordinates: Literal["auto", "pixels", "resized", "relative1000", "relative1"] = "auto"
    """How the model states places in images; tasks state them in pixels of the file, and tools and rewards convert.
    pixels: of the image in full size. resized: pixels of the image as the model gets it. relative1000, relative1: from
    0 to 1000, or to 1, on each side. auto: as the model's family has learned it, resized for Qwen2.5-VL and
    relative1000 for Qwen2-VL, Qwen3-VL, Qwen3.5, GLM-4.xV and InternVL. `agentfactory doctor --coordinates` asks a
    model."""
    concurrency: PositiveInt | Literal["auto"] = 64
    """Chains alive at a time. auto starts at server.max_num_seqs and, while training, follows the server's load. For
    generation to run ahead, train.batch_size x group_size x (max_staleness + 1) chains must fit."""
    workers: PositiveInt = 1
    """Number of rollout worker processes. Each runs an equal share of every batch, with tool servers of its own;
    `concurrency`, `limits.calls_per_second` and the capacities of pools are for all together. More than one is useful
    if a worker takes a whole core, from about 1,000 chains on."""
    max_staleness: int = Field(default=0, ge=0)
    """Maximum age of a trained token, in updates; 0 alternates generation and training."""
    inflight: Inflight = Inflight.RECOMPUTE
    """What happens to the caches of running chains when full weights are updated: recompute | keep. With an adapter, a
    running turn keeps its adapter."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Time limit of one chain; scoring may take the same time again."""
    equal_rewards: EqualRewards = EqualRewards.KEEP
    """What to do with groups whose chains all have the same reward: keep | drop | refill. With drop, a batch has fewer
    groups, but at least one."""
    on_outcome: dict[Outcome, OutcomePolicy] = {}
    """Outcome -> drop | mask | keep | retry. By default, failed chains are dropped and all others are kept.
    {max_tokens: mask, context_overflow: mask} trains no chain that was cut short. Chains without a reward cannot be
    trained: cancelled allows only drop, reward_error only drop or retry."""
    curriculum: CurriculumConfig | None = None
    """Visit solved and hopeless tasks less often; null visits each task once per epoch."""

    @field_validator("agent", mode="before")
    @classmethod
    def _name_alone(cls, agent: Any) -> Any:
        return {"name": agent} if isinstance(agent, str) else agent

    @field_serializer("agent", mode="wrap")
    def _as_name(self, agent: AgentConfig | None, plain: SerializerFunctionWrapHandler) -> Any:
        # as a person writes it, and as older runs have it
        return plain(agent) if agent is None or not isinstance(agent.options, NoOptions) else agent.name

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
        """Return the policy for chains with this outcome."""
        return self.on_outcome.get(outcome, OutcomePolicy.DROP if outcome.failed else OutcomePolicy.KEEP)

    @property
    def scored(self) -> frozenset[Outcome]:
        """The outcomes of chains that get a reward."""
        return frozenset(outcome for outcome in Outcome if self.outcome_policy(outcome).scored)


_POSSIBLE = {
    Outcome.REWARD_ERROR: (OutcomePolicy.DROP, OutcomePolicy.RETRY),
    # a chain that the staleness bound cancelled is not replaced in its group
    Outcome.CANCELLED: (OutcomePolicy.DROP,),
}
"""Policies allowed for outcomes that cannot be scored; all other outcomes allow every policy."""


class EvalConfig(Section):
    """Evaluation on held-out tasks: before training, after it, and every `every` steps."""

    data: DataConfig | None = None
    """Held-out tasks; null disables evaluation."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before and after training."""
    samples: PositiveInt = 1
    """Sampled chains per task."""
    greedy: bool = True
    """Also run one chain per task at temperature 0."""
    request: dict[str, Any] = {}
    """Fields to add to each request to a chat endpoint (`agentfactory eval --url`) or to override in it; null removes a
    field, such as {max_tokens: null, max_completion_tokens: 512}."""


class RolloutRecipe(ToolsRecipe):
    """The recipe fields that the rollout package reads."""

    seed: int = Field(default=0, ge=0)
    """Seed for data order, weights and sampling."""
    model: ModelConfig
    data: DataConfig | None = None
    rewards: list[RewardConfig] = []
    """`@reward` functions, added up. A name alone stands for {reward: NAME}. If empty, the environment's own reward is
    used."""
    rollout: RolloutConfig = RolloutConfig()
    server: ServerConfig = ServerConfig()
    eval: EvalConfig = EvalConfig()

    @field_validator("rewards", mode="before")
    @classmethod
    def _name_alone(cls, rewards: Any) -> Any:
        if not isinstance(rewards, list):
            return rewards
        return [{"reward": entry} if isinstance(entry, str) else entry for entry in rewards]

    @property
    def max_loras(self) -> int:
        """Number of adapters that the server holds at a time: the next one, and all that turns may still use."""
        return max(4, self.rollout.max_staleness + 2)

    def with_model(self, path: str) -> Self:
        """Return the same recipe for the model at `path`."""
        return self.model_copy(update={"model": self.model.model_copy(update={"path": path})})

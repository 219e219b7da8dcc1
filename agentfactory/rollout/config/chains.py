"""Settings of chains, which a recipe has for all of them and a source of tasks for its own: rollout's first part, and
rewards."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_serializer, field_validator

from agentfactory.base.config import Choice, NoOptions, Penalty, PositiveInt, Section, TypedOptions
from agentfactory.base.errors import Fault
from agentfactory.base.processes.sandbox_limits import ProgramLimits, SandboxKind
from agentfactory.base.user_code.entry_points import SOURCES, registered
from agentfactory.rollout.trajectory import Outcome


class ContextConfig(Section):
    """Handling of a chain whose context grows long. Later turns are sampled in a new row, which shares the chain's
    advantage."""

    prompt: ClassVar[str] = (
        "Summarize what was done and found so far, and what is left to do. You will go on from this summary."
    )
    """Prompt that asks the model for a summary."""

    policy: Literal["keep", "truncate", "summarize"] = "keep"
    """keep: the context grows until rollout.max_total_tokens ends the chain. truncate: the new row drops old turns.
    summarize: the model writes a summary, which opens the new row; the summary is a turn and is trained. Both begin at
    three quarters of rollout.max_total_tokens."""
    keep_turns: int = Field(default=2, ge=0)
    """truncate, summarize: number of most recent turns, with their tool results, to keep in the new row."""
    keep_images: PositiveInt | None = None
    """Maximum number of images in a row, under any policy. When a tool result exceeds it, a new row starts without the
    oldest turns that have images; the opening messages and the last turn always stay. Null: no limit."""

    def _faults(self) -> Iterator[Fault]:
        if self.policy == "truncate" and self.keep_turns == 0:
            problem = "got 0 with policy=truncate, which would drop all turns"
            yield "keep_turns", problem, "use at least 1, or policy=summarize"
        if self.policy == "keep" and self.keep_turns != 2:
            problem = f"got {self.keep_turns} with policy=keep, which keeps all turns"
            yield "keep_turns", problem, "set policy to truncate or summarize, or remove it"


class RewardConfig(Section):
    """A reward function; several are summed."""

    reward: str
    """`FILE.py:NAME` of a `@reward` function, or the name of a prebuilt reward."""
    weight: float = 1.0
    """Factor applied to the returned value."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Time limit for one call; a chain that exceeds it ends as reward_error."""
    options: dict[str, Any] = {}
    """Additional keyword arguments; they take precedence over fields of the data."""


class UserConfig(Section):
    """A simulated user, who speaks between the agent's turns until the conversation is over. The user's messages are
    context, which is not trained."""

    seconds: ClassVar[float] = 120.0
    """Time limit for one message of the user; a chain that exceeds it ends as user_error."""

    name: str
    """`model`: a language model with a prompt of its own. Or `FILE.py:NAME` of a generator function, async or not, or
    of a class whose instances are called as one: it yields the user's messages, and gets the agent's answer to each."""
    options: dict[str, Any] = {}
    """Options of the model, or additional keyword arguments of NAME. `tools` lists tools of the recipe that the user
    calls and the agent does not get."""


class ProgramOptions(Section):
    """Options of `rollout.agent.command`, which runs a program as the agent."""

    processes: ClassVar[int] = 256
    """In the sandbox: maximum number of concurrent processes and threads of a chain."""
    disk_mb: ClassVar[int] = 4096
    """In the sandbox: maximum total size of the files in a chain's folder, in MiB."""

    env: dict[str, str] = {}
    """Additional environment variables of the program, with `${task.FIELD}`, `${chain}`, and `${NAME}` for a variable
    of this process. By default it gets only PATH and a few others, with the chain's folder as HOME."""
    workspace: str | None = None
    """Folder to copy into each chain's folder before the program starts."""
    files: str | None = None
    """Folder of the files that a row's `files` names in a list. They are copied into the chain's folder."""
    sandbox: SandboxKind = SandboxKind.BUBBLEWRAP
    """bubblewrap: the program can read the machine's programs and libraries, the files named in command and its own
    folder; its only network access is the model. none: the program has all permissions of this process
    (docs/sandbox.md)."""
    readable: list[str] = []
    """In the sandbox: additional files and folders that the program may read."""
    memory_mb: PositiveInt = 4096
    """In the sandbox: total memory of a chain's processes, in MiB; `/tmp` may take the same amount in addition."""

    def _faults(self) -> Iterator[Fault]:
        for field in ("readable", "memory_mb"):
            # compare with defaults: a resolved recipe, which each process of a run reads, sets every field
            if self.sandbox is SandboxKind.NONE and getattr(self, field) != type(self).model_fields[field].default:
                yield field, f"got {getattr(self, field)!r} with sandbox=none", "remove one of them"
        try:
            ProgramLimits(self.processes, self.memory_mb, self.disk_mb)
        except ValueError as error:
            field, _, problem = str(error).partition(": ")
            yield field, problem, "change it"


class OutsideOptions(Section):
    """Options of the agent `outside`: external programs that fetch tasks over HTTP, from the routes `POST /tasks`,
    `/tools` and `/reward` beside the model's. Programs must present the token in the environment variable
    `AGENTFACTORY_TOKEN`."""

    token_env: ClassVar[str] = "AGENTFACTORY_TOKEN"

    port: int = Field(default=0, ge=0, le=65535)
    """Loopback port that serves the tasks; 0 picks a free one. The log has the address."""


class AgentConfig(Choice):
    """The agent that runs the chains: a class or function given by name, a program started once per chain, or external
    programs. A plain string is short for {name: STRING}."""

    chooser = "name"
    kinds = {"command": ProgramOptions, "outside": OutsideOptions}

    name: str | None = None
    """`FILE.py:NAME` of an `Agent` class that overrides `generate` or `parse`, constructed without arguments, or of an
    async function that runs its own loop. `outside`: external programs that fetch tasks over HTTP. A registered source
    whose tasks bring their agent sets its own name here."""
    command: list[str] = []
    """Alternative to name: a program and its arguments. `${task.FIELD}` stands for a field of the row, `${chain}` for
    the chain's folder, which is the working directory. The environment variables `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
    `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` point to the model."""
    options: TypedOptions = None
    """Options of command or outside."""

    @classmethod
    def choice(cls, fields: Mapping[str, Any]) -> str | None:
        found = fields.get("name")
        return "command" if fields.get("command") else None if found is None else str(found)

    @classmethod
    def options_type(cls, choice: str) -> type[Section]:
        return cls.kinds.get(choice, NoOptions)

    @property
    def outside(self) -> OutsideOptions | None:
        """The options of the agent `outside`; None for other agents."""
        return self.options if isinstance(self.options, OutsideOptions) else None

    @property
    def reports(self) -> bool:
        """True if the agent reports the chain's reward: external programs, and agents of sources."""
        return self.name is not None and ".py:" not in self.name

    def _faults(self) -> Iterator[Fault]:
        if (self.name is None) == (not self.command):
            yield "", "it must have either a name or a command", "set one of name and command, and the other to null"
        known = {"outside", *registered(SOURCES)}
        if self.name is not None and self.name not in known and ".py:" not in self.name:
            yield "name", f"got {self.name!r}", "write FILE.py:NAME, or outside"


class ChainConfig(Section):
    """Settings of chains."""

    group_size: PositiveInt = 8
    """Chains per task; group-relative advantages compare them."""
    max_turns: PositiveInt = 8
    """Maximum assistant turns per chain."""
    max_tokens: PositiveInt = 512
    """Maximum sampled tokens per turn."""
    max_total_tokens: PositiveInt = 8192
    """Maximum length of a row in tokens, prompt included; must not exceed the server's max_model_len. A chain has one
    row, unless its template rewrites history or rollout.context shortens it."""
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
    user: UserConfig | None = None
    """A simulated user. Null: a chain ends with the agent's first turn without a tool call."""
    assistant_prefix: str = ""
    """Text that starts each assistant turn, such as `<think>`. It is context and is not trained. Summaries of
    rollout.context do not get it."""
    context: ContextConfig = ContextConfig()
    """Handling of a chain whose context grows long."""
    outcome_penalty: dict[Outcome, Penalty] = {}
    """Outcome -> amount subtracted from the chain's reward, such as {max_turns: 0.5}."""
    coordinates: Literal["auto", "pixels", "resized", "relative1000", "relative1"] = "auto"
    """Coordinate system of the model's points and boxes in images. Tasks give them in pixels of the file; tools and
    rewards convert. pixels: of the full-size image. resized: pixels of the image after the processor resized it.
    relative1000, relative1: 0 to 1000, or 0 to 1, along each side. auto: the convention of the model's family, resized
    for Qwen2.5-VL and relative1000 for Qwen2-VL, Qwen3-VL, Qwen3.5, GLM-4.xV and InternVL. `agentfactory doctor
    --coordinates` tests a model."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Time limit of one chain, from its reset to its last turn; scoring may take the same time in addition."""

    @field_validator("agent", "user", mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @property
    def user_tools(self) -> list[str]:
        """The tools that the simulated user has, and the agent does not."""
        given = [] if self.user is None else self.user.options.get("tools", [])
        return given if isinstance(given, list) else [given]

    @field_serializer("agent", mode="wrap")
    def _as_name(self, agent: AgentConfig | None, plain: SerializerFunctionWrapHandler) -> Any:
        # the short form, which users write and which older runs contain
        return plain(agent) if agent is None or not isinstance(agent.options, NoOptions) else agent.name

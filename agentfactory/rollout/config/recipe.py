"""The recipe fields of the rollout package: the sections rollout and eval, and the whole."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import Field, field_validator

from agentfactory.base.config import McpServerConfig, PositiveInt, Section, ToolsRecipe
from agentfactory.base.errors import Fault, SettingError
from agentfactory.rollout.config.chains import AgentConfig, ChainConfig, RewardConfig
from agentfactory.rollout.config.data import CurriculumConfig, DataConfig
from agentfactory.rollout.config.model import ModelConfig
from agentfactory.rollout.config.server import ServerConfig
from agentfactory.rollout.config.sources import OF_RECIPE, SourceConfig, TasksConfig, names_alone, sections
from agentfactory.rollout.trajectory import Outcome

_VARIABLE = re.compile(r"\$\{?(\w+)")


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


class RolloutConfig(ChainConfig):
    """Rollout settings: sampling, limits, context, agent and filters of chains."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same value."""
    concurrency: PositiveInt | Literal["auto"] = "auto"
    """Number of concurrent chains. auto: as many as have their contexts in the servers' KV caches. If contexts outgrow
    the caches, turns of the youngest chains wait; timeout_seconds stands still meanwhile."""
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
    equal_rewards: EqualRewards = EqualRewards.KEEP
    """Treatment of groups whose chains all have the same reward: keep | drop | refill. With drop, a batch has fewer
    groups, but at least one."""
    on_outcome: dict[Outcome, OutcomePolicy] = {}
    """Outcome -> drop | mask | keep | retry. By default, failed chains are dropped and all others are kept.
    {max_tokens: mask, context_overflow: mask} excludes chains that were cut short from training. Chains without a
    reward cannot be trained: cancelled allows only drop, reward_error only drop or retry."""
    curriculum: CurriculumConfig | None = None
    """Visit solved and hopeless tasks less often. Null: visit each task once per epoch."""

    def _faults(self) -> Iterator[Fault]:
        for outcome, policy in self.on_outcome.items():
            possible = _POSSIBLE.get(outcome, tuple(OutcomePolicy))
            if policy not in possible:
                problem = f"got {policy}, but such a chain has no reward"
                yield f"on_outcome.{outcome}", problem, f"use {' or '.join(possible)}"

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

    data: TasksConfig | None = None
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


RecipeT = TypeVar("RecipeT", bound="RolloutRecipe")


@dataclass(frozen=True)
class Part(Generic[RecipeT]):
    """The part of a recipe that concerns one source of tasks. `recipe` has its tasks as `data` and its settings, and no
    held-out tasks. `source` is its entry in `sources`; None for the tasks of a recipe without sources. `section` is
    the name of its tasks in errors."""

    section: str
    recipe: RecipeT
    source: SourceConfig | None = None

    @property
    def name(self) -> str:
        """The name of the source; empty for a recipe without sources."""
        return "" if self.source is None else self.source.name

    @property
    def called(self) -> str:
        """The words by which messages name its tasks."""
        return f"source {self.name}" if self.name else self.section

    def field(self, name: str) -> str:
        """Return where the whole recipe has the field `name` of this part."""
        if f"{name}.".startswith(f"{self.section}."):
            return name
        first, _, rest = name.partition(".")
        own = set() if self.source is None else self.source.own
        if first == "data":
            return ".".join(filter(None, (self.section, rest)))
        if first in own & OF_RECIPE:
            return f"{self.section}.{name}"
        return f"{self.section}.{rest}" if first == "rollout" and rest.partition(".")[0] in own else name

    def located(self, error: SettingError) -> SettingError:
        """Return an error about this part's recipe as one about the whole recipe. If the field is the whole recipe's,
        the problem names the source."""
        field = self.field(error.field)
        is_own = self.source is None or not field or f"{field}.".startswith(f"{self.section}.")
        problem = error.problem if is_own else f"{error.problem}, in {self.section} ({self.name})"
        return SettingError(field, problem, error.fix, error.source)

    def acts_like(self, other: "Part[Any]") -> bool:
        """Return whether chains of both have the same settings, and can share their tools."""
        return all(getattr(self.recipe, name) == getattr(other.recipe, name) for name in ("rollout", *OF_RECIPE))


class RolloutRecipe(ToolsRecipe):
    """The recipe fields that the rollout package reads."""

    seed: int = Field(default=0, ge=0)
    """Seed of data order, weight initialization and sampling."""
    model: ModelConfig
    data: TasksConfig | None = None
    rewards: list[RewardConfig] = []
    """`@reward` functions, summed. A plain string is short for {reward: STRING}. If empty, the environment's own reward
    is used."""
    rollout: RolloutConfig = RolloutConfig()
    server: ServerConfig = ServerConfig()
    eval: EvalConfig = EvalConfig()

    _names_alone = field_validator("rewards", mode="before")(names_alone)

    def _complete(self) -> None:
        both = (self.data, self.eval.data)
        if not any(data is not None and data.sources for data in both):
            # otherwise each part has its own
            for data in both:
                self.tools = _with_world(self.tools, self.mcp_servers, data)
                self.rollout = _with_agent(self.rollout, data)
        if self.model.dtype == "auto":
            # imported here, because resolved recipes do not need it
            from agentfactory.base.processes.devices import fastest_dtype

            # doctor always tells
            is_asked = "dtype" in self.model.model_fields_set
            dtype = "bfloat16" if self.plans_for_a_gpu else fastest_dtype(self.model.path, tell=is_asked)
            self.model = self.model.model_copy(update={"dtype": dtype})

    def _faults(self) -> Iterator[Fault]:
        # memory is planned, and losses are normalised, for the longest rows
        most = self.rollout.max_total_tokens
        for section, data in [*sections(self.data, "data"), *sections(self.eval.data, "eval.data")]:
            if isinstance(data, SourceConfig) and data.max_total_tokens > most and "max_total_tokens" in data.own:
                problem = f"got {data.max_total_tokens}, more than rollout.max_total_tokens={most}"
                yield f"{section}.max_total_tokens", problem, "lower it, or raise that of rollout"
        for part in self.parts() if self.rollout.equal_rewards is not EqualRewards.KEEP else []:
            if part.recipe.rollout.group_size == 1:
                problem = f"got {self.rollout.equal_rewards} with groups of one chain in {part.section}"
                yield "rollout.equal_rewards", f"{problem}, which would all be dropped", "use keep"
        if self.eval.data is not None and self.eval.data.curriculum is not None:
            yield "eval.data.curriculum", "is set, but each held-out task is visited once", "remove it"
        for index, source in enumerate([] if self.eval.data is None else self.eval.data.sources):
            if source.weight != 1.0:
                problem = f"got {source.weight:g}, but each held-out task is visited once"
                yield f"eval.data.sources.{index}.weight", problem, "remove it"
            if source.teacher_url is not None:
                problem = f"got {source.teacher_url!r}, but no teacher grades held-out tasks"
                yield f"eval.data.sources.{index}.teacher_url", problem, "remove it"

    def variables(self) -> set[str]:
        """Return the environment variables that the recipe names: in `env`, in fields such as `api_key_env`, and as
        `${NAME}`; those of the hub's token if it names a model or data of the hub."""
        agents = [self.rollout.agent, *(part.recipe.rollout.agent for part in self.parts())]
        found = {*self.env, *(agent.outside.token_env for agent in agents if agent is not None and agent.outside)}

        def collect(value: Any, field: str = "") -> None:
            match value:
                case str():
                    found.update([value] if field.endswith("_env") else _VARIABLE.findall(value))
                case dict():
                    for name, each in value.items():
                        collect(each, name)
                case list():
                    for each in value:
                        collect(each)

        collect(self.model_dump(mode="json", include=set(RolloutRecipe.model_fields)))
        paths = [self.model.path, *(part.recipe.data.path for part in self.parts() if part.recipe.data is not None)]
        uses_hub = any(path and not os.path.isabs(path) for path in paths)
        return found | {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"} if uses_hub else found

    def parts(self) -> "list[Part[Self]]":
        """Return the part of each source of tasks; without sources, the only one."""
        return [self._part(section, data) for section, data in sections(self.data, "data")]

    def held_out_parts(self) -> "list[Part[Self]]":
        """Return the part of each source of held-out tasks, on the settings of the source of this name if there is
        one; none without held-out tasks."""
        trained = {source.name: source for source in ([] if self.data is None else self.data.sources)}
        return [
            self._part(section, data, trained.get(data.name) if isinstance(data, SourceConfig) else None)
            for section, data in sections(self.eval.data, "eval.data")
        ]

    def _part(self, section: str, data: DataConfig, below: SourceConfig | None = None) -> "Part[Self]":
        held_out = self.eval.model_copy(update={"data": None, "every": 0})
        recipe = self.model_copy(update={"data": data, "eval": held_out})
        part = Part(section, recipe, data if isinstance(data, SourceConfig) else None)
        if isinstance(data, SourceConfig):
            rows = {name: getattr(data, name) for name in DataConfig.model_fields if name in data.model_fields_set}
            recipe.data = TasksConfig.model_validate(rows | (data.model_extra or {}))
            for source in filter(None, (below, data)):
                own = {name: getattr(source, name) for name in source.own}
                rollout = {name: own.pop(name) for name in [*own] if name not in OF_RECIPE}
                recipe = recipe.model_copy(update={**own, "rollout": recipe.rollout.model_copy(update=rollout)})
        recipe.tools = _with_world(recipe.tools, recipe.mcp_servers, data)
        try:
            recipe.rollout = _with_agent(recipe.rollout, data)
        except SettingError as error:
            raise part.located(error) from None
        return replace(part, recipe=recipe)

    @property
    def largest_group(self) -> int:
        return max((part.recipe.rollout.group_size for part in self.parts()), default=self.rollout.group_size)

    def most_chains(self, workers: int = 1) -> int:
        """Return the maximum number of chains of one of `workers` whose turns a server samples. With
        rollout.concurrency=auto, each may have as many as the server takes."""
        limit = self.rollout.concurrency
        return self.server.max_num_seqs if limit == "auto" else -(-limit // workers)

    def longest_call(self) -> tuple[float, str]:
        """See ToolsRecipe: a reset may take as long as its chain."""
        return self.rollout.timeout_seconds, "rollout.timeout_seconds"

    @property
    def plans_for_a_gpu(self) -> bool:
        """True if the recipe names a GPU's memory; this machine may then have none."""
        return False

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


def _with_world(tools: list[str], servers: dict[str, McpServerConfig], data: DataConfig | None) -> list[str]:
    """Return `tools` with the world that plays the tasks of `data`, unless the recipe names it."""
    world = None if data is None else data.world
    if world is None or world in {*tools, *(server.module for server in servers.values())}:
        return tools
    return [*tools, world]


def _with_agent(rollout: RolloutConfig, data: DataConfig | None) -> RolloutConfig:
    """Return `rollout` with the agent of the source of `data`, if it has one."""
    name, source = (data and data.registered) or ("", None)
    if source is None or source.agent is None or (rollout.agent is not None and rollout.agent.name == name):
        return rollout
    if rollout.agent is not None:
        raise SettingError("rollout.agent", f"is set, but data.{name} brings its own agent", "set it to null")
    return rollout.model_copy(update={"agent": AgentConfig(name=name)})


def distinct(parts: Sequence[Part[RecipeT]]) -> list[Part[RecipeT]]:
    """Return the parts whose chains have other settings than those of the parts before."""
    return [part for number, part in enumerate(parts) if not any(map(part.acts_like, parts[:number]))]

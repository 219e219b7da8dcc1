"""The recipe's section data with several sources of tasks, each with settings for its own chains."""

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from agentfactory.base.config import LimitsConfig, McpServerConfig
from agentfactory.base.errors import Fault, SettingError
from agentfactory.rollout.config.chains import ChainConfig, RewardConfig
from agentfactory.rollout.config.data import CurriculumConfig, DataConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def names_alone(rewards: Any) -> Any:
    """Expand plain strings in a list of rewards to {reward: STRING}."""
    if not isinstance(rewards, list):
        return rewards
    return [{"reward": entry} if isinstance(entry, str) else entry for entry in rewards]


class SourceConfig(DataConfig, ChainConfig):
    """One of several sources of tasks: what `data` says of a single one, and settings of its chains. A setting that it
    leaves out is the recipe's, from `rollout` or the top; one that it has replaces the recipe's as a whole."""

    model_config = ConfigDict(extra="allow")

    name: str
    """Name, for metrics and messages. A source of `eval.data` with the name of one of `data` has its settings."""
    weight: float = Field(default=1.0, gt=0, le=1e9)
    """Share of the groups, relative to the other sources' weights. For `data` only."""
    teacher_url: str | None = None
    """Address of the server that grades its chains. Null: `teacher.url`. For `data` only."""
    tools: list[str] = []
    """See the recipe's `tools`."""
    mcp_servers: dict[str, McpServerConfig] = {}
    """See the recipe's `mcp_servers`."""
    rewards: list[RewardConfig] = []
    """See the recipe's `rewards`."""
    limits: LimitsConfig = LimitsConfig()
    """See the recipe's `limits`."""

    _names_alone = field_validator("rewards", mode="before")(names_alone)

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise SettingError("", f"got {name!r}", "use letters, digits, _, - and ., for metrics have this name")
        return name

    @model_serializer(mode="wrap")
    def _without_the_recipes(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # a value for a setting that the source leaves out would replace the recipe's
        found: dict[str, Any] = plain(self)
        given = {name: value for name, value in found.items() if name in self.own or name not in SETTINGS}
        return {"name": given.pop("name"), **given}

    @property
    def own(self) -> set[str]:
        """The names of the settings that the source has."""
        return self.model_fields_set & SETTINGS


OF_RECIPE = {"tools", "mcp_servers", "rewards", "limits"}
"""Settings of a source that a recipe has at its top."""
SETTINGS = OF_RECIPE | ChainConfig.model_fields.keys()
"""All settings that a source may have in place of the recipe's."""


class TasksConfig(DataConfig):
    """Tasks: rows with `question` or `messages`. Other fields are passed to tools and rewards by name. The `images` of
    a row (paths relative to the file, bytes, base64) replace the `<image>` markers in its text; without markers they
    open its first user message. Messages in the OpenAI format may also contain image parts. The section of a registered
    source, or several `sources`, can replace path."""

    sources: list[SourceConfig] = []
    """Several sources of tasks, in place of path. Each batch has groups of all of them, by their weights."""
    curriculum: CurriculumConfig | None = None
    """Visit solved and hopeless sources less often. Null: visit them by their weights alone."""

    @property
    def origins(self) -> dict[str, Any]:
        return super().origins | ({"sources": [source.name for source in self.sources]} if self.sources else {})

    def _faults(self) -> Iterator[Fault]:
        yield from super()._faults()
        if not self.sources:
            if self.curriculum is not None:
                yield "curriculum", "is set without data.sources", "for single tasks, set rollout.curriculum"
            return
        names = [source.name for source in self.sources]
        for index, name in enumerate(names):
            if name in names[:index]:
                yield f"sources.{index}.name", f"two sources are called {name!r}", "rename one"
        for name in ("columns", "limit", "shuffle"):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                yield name, f"got {value} beside sources", "set it in the sources that need it"


def sections(config: DataConfig | None, section: str) -> Iterator[tuple[str, DataConfig]]:
    """Yield the single sources of `config`, which errors call `section`, with their own names in errors."""
    if isinstance(config, TasksConfig) and config.sources:
        yield from ((f"{section}.sources.{index}", source) for index, source in enumerate(config.sources))
    elif config is not None:
        yield section, config

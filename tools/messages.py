"""Messages, tool calls and results: what passes between an agent and the things it acts on."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""One chat message in the OpenAI shape: `role`, `content`, for assistants `tool_calls`, for tools `name` and
`tool_call_id`. Plain JSON, because chat templates and files take it as it is."""


class CallError(StrEnum):
    """Why a call did not give the model what it asked for. Each is told to the model; the chain goes on."""

    MALFORMED_CALL = "malformed_call"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    TOOL_ERROR = "tool_error"
    TIMEOUT = "tool_timeout"


@dataclass(frozen=True)
class ToolSpec:
    """What the model is told about one tool. `parameters` is a JSON Schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]

    def to_openai(self) -> dict[str, Any]:
        """The shape that chat templates and OpenAI-compatible servers take."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


@dataclass(frozen=True)
class ToolCall:
    """One call that a model made. `id` is unique within its chain."""

    id: str
    name: str
    arguments: dict[str, Any]

    def to_openai(self) -> dict[str, Any]:
        """The shape of an entry of `tool_calls` (arguments as an object, as chat templates want it)."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolResult:
    """What a call gave: text for the model, and the kind of error if it was one. `seconds` is the call's duration."""

    content: str
    error: CallError | None = None
    seconds: float = 0.0

    def to_message(self, call: ToolCall) -> Message:
        """The `tool` message that answers `call`."""
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": self.content}


class ToolInfrastructureError(Exception):
    """A tool server could not be reached, died or broke the protocol: not the model's doing, never a reward of 0."""


class EnvironmentRewardError(ToolInfrastructureError):
    """An environment failed to judge a chain, or answered with something that is no reward."""


@dataclass
class EnvironmentReward:
    """What an environment says of a finished chain: its reward, and named numbers beside it (such as `success`)."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)

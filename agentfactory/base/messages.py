"""Messages, tool calls and results: the data exchanged between an agent and its tools."""

import math
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""One chat message in the OpenAI format, as plain JSON: `role`, `content`, `tool_calls`, `name`, `tool_call_id`."""


Content = str | list[dict[str, Any]]
"""The content of a message or a result: text, or parts in the OpenAI format: `{"type": "text", "text": ...}` and
`{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`."""


def own_copy(value: Any) -> Any:
    """Copy the mappings and lists of a JSON-like value; everything else in it is shared."""
    if type(value) is dict:
        return {key: own_copy(part) for key, part in value.items()}
    if type(value) is list:
        return [own_copy(part) for part in value]
    return value


def text_of(content: Content) -> str:
    """Return `content` as text, with at least one line per part; an image becomes a visible marker."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else _marker(part) for part in content)


def _marker(part: dict[str, Any]) -> str:
    url = part["image_url"]["url"]
    if url.startswith("data:"):
        return f"[{url[5 : url.index(';')]} image]"
    # an image stored with the run: its name of 32 letters would not help a reader
    return "[image]" if url.startswith("image:") else f"[image {url}]"


class CallError(StrEnum):
    """The reason why a call failed. The model reads about each of these, and the chain continues."""

    MALFORMED_CALL = "malformed_call"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    TOOL_ERROR = "tool_error"
    TIMEOUT = "tool_timeout"
    LIMIT = "tool_limit"


@dataclass(frozen=True)
class ToolSpec:
    """The description of one tool for the model. `parameters` is a JSON Schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]

    def to_openai(self) -> dict[str, Any]:
        """Return the tool in the format of chat templates and OpenAI-compatible servers."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


def object_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def properties_of(schema: Any) -> dict[str, Any]:
    """Return the subschemas in `properties`; empty if the schema, which may have any shape, has none."""
    return object_of(object_of(schema).get("properties"))


def required_of(schema: Any) -> list[str]:
    """Return the names in `required`; empty if the schema, which may have any shape, has none."""
    required = object_of(schema).get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def referred(reference: Any, root: dict[str, Any], missing: Any = None) -> Any:
    """Return the schema at a reference within `root`, such as `#/$defs/Point`; `missing` if it is not there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return missing
    found: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return missing
        found = found[name]
    return found


@dataclass(frozen=True)
class ToolCall:
    """One call that a model made. `id` is unique within its chain."""

    id: str
    name: str
    arguments: dict[str, Any]

    def to_openai(self) -> dict[str, Any]:
        """Return the call as an entry of `tool_calls` (arguments as an object, as chat templates expect)."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolResult:
    """The result of a call. `error` is set if it failed, `left_out` counts the bytes that `limits.result_bytes` cut,
    `finish` ends the chain, `info` is hidden from the model and kept in the trajectory."""

    content: Content
    error: CallError | None = None
    seconds: float = 0.0
    finish: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    left_out: int = 0

    def to_message(self, call: ToolCall) -> Message:
        """Return the `tool` message that answers `call`; it has `info` if the tool returned any."""
        message = {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": self.content}
        return {**message, "info": self.info} if self.info else message


class ToolInfrastructureError(Exception):
    """A tool server could not be reached, died or broke the protocol, which is not the model's fault."""


class EnvironmentRewardError(ToolInfrastructureError):
    """An environment failed to judge a chain, or returned an invalid reward."""


LARGEST_REWARD = 1e12
"""Bound that keeps sums of squared rewards, over batches and gradients, finite in float32."""
LARGEST_METRIC = 1e30
MOST_METRICS = 100
"""Metrics of one chain: each is a column of metrics.jsonl, of trackers and of the viewer."""
LONGEST_NAME = 100
_TOGETHER = "all rewards of the chain together"


def is_finite_number(value: Any) -> bool:
    """Return whether a value is an int or a float, and finite as a float; 10**400 is not, and neither is True."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


@dataclass
class EnvironmentReward:
    """An environment's judgement of a finished chain: its reward, and further named numbers (such as `success`)."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[float] | None = None
    """One reward per assistant turn, in order, in addition to the whole chain's `reward`."""

    @classmethod
    def parse(cls, verdict: Any, speaker: str) -> "EnvironmentReward":
        """Create it from a number, or a dict with `reward`, optional `turn_rewards` (a list), and further numbers.
        Raises TypeError, which names `speaker`, for anything else, and for values beyond the limits above."""
        if not isinstance(verdict, dict):
            return cls(_number(verdict, speaker, "reward", LARGEST_REWARD))
        if "reward" not in verdict:
            raise TypeError(f"{speaker} returned a dict without `reward`: {verdict!r:.200}")
        rest = dict(verdict)
        turns = rest.pop("turn_rewards", None)
        if turns is not None and not isinstance(turns, (list, tuple)):
            raise TypeError(f"{speaker} returned {turns!r:.200} for turn_rewards; it has to be a list of numbers")
        reward = _number(rest.pop("reward"), speaker, "reward", LARGEST_REWARD)
        _check_count(rest, speaker)
        metrics = {_name(key, speaker): _number(value, speaker, key, LARGEST_METRIC) for key, value in rest.items()}
        turns = turns if turns is None else [_number(turn, speaker, "turn_rewards", LARGEST_REWARD) for turn in turns]
        return cls(reward, metrics, turns)

    def to_json(self) -> dict[str, Any]:
        """Return the inverse of `parse`."""
        turns = {} if self.turn_rewards is None else {"turn_rewards": self.turn_rewards}
        return {"reward": self.reward, **self.metrics, **turns}

    def add(self, other: "EnvironmentReward") -> None:
        """Add the other's reward and turn rewards, and merge its metrics. Raises ValueError if both have turn rewards
        for different numbers of turns, TypeError if the sums exceed the limits above."""
        self.reward = _number(self.reward + other.reward, _TOGETHER, "reward", LARGEST_REWARD)
        self.metrics |= other.metrics
        _check_count(self.metrics, _TOGETHER)
        if self.turn_rewards is None or other.turn_rewards is None:
            self.turn_rewards = other.turn_rewards if self.turn_rewards is None else self.turn_rewards
        else:
            self.turn_rewards = [a + b for a, b in zip(self.turn_rewards, other.turn_rewards, strict=True)]
        for value in self.turn_rewards or []:
            _number(value, _TOGETHER, "turn_rewards", LARGEST_REWARD)


def _number(value: Any, speaker: str, key: Any, largest: float) -> float:
    try:
        # float would also read a text, such as "0.5"
        number = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= largest:
        problem = f"{speaker} returned {value!r:.200} for {key!s:.200}"
        raise TypeError(f"{problem}; it has to be a finite number between {-largest:g} and {largest:g}")
    return number


def _name(key: Any, speaker: str) -> str:
    name = str(key)
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        problem = f"{speaker} returned a metric called {name[:LONGEST_NAME]!r}"
        raise TypeError(f"{problem}; its name has to be of 1 to {LONGEST_NAME} printable characters")
    return name


def _check_count(metrics: dict[Any, Any], speaker: str) -> None:
    if len(metrics) > MOST_METRICS:
        problem = f"{speaker} returned {len(metrics)} numbers beside the reward"
        raise TypeError(f"{problem}; return {MOST_METRICS} at most, under names that do not change with the chain")

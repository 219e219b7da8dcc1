"""The interface of tool-call formats: calls, the tools' description and results; and the tags around reasoning."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentfactory.base.messages import Content, Message, ToolCall, ToolResult, ToolSpec, properties_of, required_of

THINK = ("<think>", "</think>")
REASONING_TAGS = (
    THINK,
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)


def reasoning_tags(text: str) -> tuple[str, str]:
    """Return the tags around `wordreason` in a rendered text, or those in a template's source; by default `<think>`."""
    before, found, after = text.partition("wordreason")
    if found:
        for tags in REASONING_TAGS:
            if before.rstrip().endswith(tags[0].rstrip()) and after.lstrip().startswith(tags[1]):
                return tags
    return next((tags for tags in REASONING_TAGS if tags[0].strip() in text), THINK)


def split_reasoning(text: str, opened: bool, tags: tuple[str, str] = THINK) -> tuple[str, str, str]:
    """Split text into the reasoning, the reasoning as written with its tags, and the text after it (empty if the
    reasoning was cut). `opened`: the text begins inside the reasoning."""
    opening, closing = tags
    inside = text.lstrip()
    if inside.startswith(opening):
        inside = inside.removeprefix(opening)
    elif not opened:
        return "", "", text
    reasoning, _, rest = inside.partition(closing)
    rest = rest.lstrip()
    return reasoning.strip(), text[: len(text) - len(rest)], rest


Arguments = dict[str, Any]
Call = tuple[str, Arguments]
MAX_REASON = 300
"""Maximum length of a parse error shown to the model, in characters, without the sentence on the correct form."""


class FormatError(ValueError):
    """A turn that is not in the format. The message, written for the model, describes the problem."""


@dataclass(frozen=True)
class Reading:
    """The content of a turn: text outside calls, the calls with their `ids` if the format writes them, and the answer
    if it marks one. If `error`, written for the model, is set, `calls` is empty and `content` the whole text."""

    content: str
    calls: list[Call] = field(default_factory=list)
    error: str | None = None
    answer: str | None = None
    ids: list[str] = field(default_factory=list)


class Parser:
    """A tool-call format in plain text: the chat template is rendered without tools. A custom parser implements `read`
    and `write`, and holds no state: one object serves all chains."""

    native: ClassVar[bool] = False
    """True if the chat template shows the tools and writes calls and results, in the format that `read` parses."""
    stops: ClassVar[tuple[str, ...]] = ()
    """Texts that end a turn outside its reasoning. `read` gets the text before them."""
    around_result: ClassVar[tuple[str, str]] = "Result of {}:\n", ""
    """Text before and after each result; {} is the tool's name."""
    call_ids: ClassVar[str] = "call_{number}"
    after_form: ClassVar[str] = ""
    """Text after the form of calls in the instructions."""

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """Parse a turn in time linear in its length. The only permitted error, for any text, is FormatError."""
        raise NotImplementedError(f"{type(self).__name__} must define read(text, specs)")

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        """Write calls as text that `read` parses back. Raises ValueError if the format cannot express them."""
        raise NotImplementedError(f"{type(self).__name__} must define write(calls, specs)")

    def write_answer(self, text: str) -> str:
        """Write a final answer, with the format's mark."""
        return text

    def split(self, text: str, opened: bool, tags: tuple[str, str]) -> tuple[str, str, str]:
        """Split a turn as `split_reasoning` does, with the chat template's tags. `read` gets the text after it."""
        return split_reasoning(text, opened, tags)

    def call_id(self, name: str, number: int) -> str:
        """Return the id of a chain's call; `number` counts the chain's calls from 0."""
        return self.call_ids.format(name=name, number=number)

    def parse(self, text: str, specs: Sequence[ToolSpec] = ()) -> Reading:
        """Call `read`, and convert a FormatError to the reading's error, followed by the correct form."""
        try:
            return self.read(text, specs)
        except FormatError as error:
            reason = str(error).rstrip(".")
            if len(reason) > MAX_REASON:  # it may quote a name of any length
                reason = reason[:MAX_REASON] + "..."
            return Reading(text.strip(), error=f"{reason}. {self.form(specs)}".strip())

    def form(self, specs: Sequence[ToolSpec]) -> str:
        """Return one sentence that shows how to write a call; the message about a malformed turn ends with it."""
        if not specs:
            return ""
        names = properties_of(specs[0].parameters)
        return f"Write a call as\n{self.write([(specs[0].name, {name: '...' for name in names})], specs)}"

    def instructions(self, specs: Sequence[ToolSpec]) -> str | None:
        """Return the system message's description of tools and calls, if any. Raises ValueError if it cannot call
        them."""
        return f"{describe(specs)}\n\n{self.form(specs)}{self.after_form}" if specs else None

    def answers(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        """Return the results as one user message."""
        before, after = self.around_result
        told = [(before.format(call.name), result, after) for call, result in zip(calls, results, strict=True)]
        return [join_results(told)]

    def complaint(self, text: str) -> list[Message]:
        """Return the message about a malformed turn."""
        return [{"role": "user", "content": text}]


class NativeParser(Parser):
    """A tool-call format that the chat template supports: it shows the tools, and writes calls and results."""

    native = True
    marks: ClassVar[tuple[str, ...]] = ()
    """Tokens of a format whose calls some templates do not write, although they describe the tools. The format is
    recognised by these tokens in the tokenizer, and calls in history are written into the content."""

    def write_as_content(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        """Write calls with their tokens, for templates that do not."""
        return self.write(calls, specs)

    def instructions(self, specs: Sequence[ToolSpec]) -> str | None:
        return None

    def answers(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        return [result.to_message(call) for call, result in zip(calls, results, strict=True)]

    def complaint(self, text: str) -> list[Message]:
        """Return a tool message that answers no call. The renderer converts it to a user message if necessary."""
        return [{"role": "tool", "content": text}]


def call_of(call: dict[str, Any]) -> Call:
    """Return the name and arguments of a call in OpenAI's format, whose arguments may be JSON text."""
    arguments = call["function"]["arguments"]
    return call["function"]["name"], json.loads(arguments) if isinstance(arguments, str) else arguments


def with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call in OpenAI's format with its arguments as JSON text."""
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def parameter_schema(spec: ToolSpec, key: str) -> dict[str, Any]:
    """Return the schema of a tool's parameter; a string schema if the tool has no such parameter."""
    rest = spec.parameters.get("additionalProperties")
    schema: dict[str, Any] = rest if isinstance(rest, dict) else {"type": "string"}
    return properties_of(spec.parameters).get(key, schema)


def sole_parameter(spec: ToolSpec) -> str | None:
    """Return the parameter that a call may pass without its name: the only required one, or the only one."""
    required = required_of(spec.parameters)
    names = required if len(required) == 1 else list(properties_of(spec.parameters))
    return names[0] if len(names) == 1 else None


def find_spec(name: str, specs: Sequence[ToolSpec]) -> ToolSpec | None:
    return next((spec for spec in specs if spec.name == name), None)


def describe(specs: Sequence[ToolSpec]) -> str:
    """Describe the tools, one per paragraph: name, description, and the schema of the arguments."""
    told = [f"{s.name}: {s.description}\nArguments: {json.dumps(s.parameters, ensure_ascii=False)}" for s in specs]
    return "You have these tools.\n\n" + "\n\n".join(told)


def join_results(told: Sequence[tuple[str, ToolResult, str]]) -> Message:
    """Join several results into one user message, each between two texts. Images remain parts, in order."""
    content: Content
    if all(isinstance(result.content, str) for _, result, _ in told):
        content = "\n".join(f"{before}{result.content}{after}" for before, result, after in told)
    else:
        content = [part for each in told for part in _parts(*each) if part.get("text") != ""]
    info = {key: value for _, result, _ in told for key, value in result.info.items()}
    return {"role": "user", "content": content, **({"info": info} if info else {})}


def _parts(before: str, result: ToolResult, after: str) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": result.content}] if isinstance(result.content, str) else result.content
    return [{"type": "text", "text": before}, *text, {"type": "text", "text": after}]

"""What a model reads first: text and ids of a prompt, with a made call and its answer, as a chain has them."""

from collections.abc import Sequence
from typing import Any

from agentfactory.rollout.parsers import NativeParser
from agentfactory.rollout.parsers.parser import parameters
from agentfactory.rollout.template_renderer import TemplateRenderer
from agentfactory.tools.messages import Message, ToolResult, ToolSpec

_MADE: dict[str, Any] = {"integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}, "null": None}


def describe_prompt(renderer: TemplateRenderer, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> str:
    """Describe the first prompt of a chain that `messages` open, in lines for a person: which format it is and why, the
    text, the ids, a made call of the first tool and what follows it. Raises ValueError if it cannot be rendered."""
    info = renderer.info
    stops = ", ".join(f"{renderer.tokenizer.decode([token])!r} ({token})" for token in renderer.stop_token_ids)
    lines = [
        f"format: {info['parser']}",
        f"template: {info['template']}, sha256 {info['template_sha256'][:12]}",
        f"rows: {info['choice']}: {info['rows']}",
        f"a turn ends with: {stops}",
        *(f"because: {reason}" for reason in info["reasons"]),
    ]
    tools = list(specs)
    opening = renderer.instruct(messages, tools)
    ids = renderer.open(opening, tools)
    lines += _shown("the first prompt", renderer, ids)
    if tools:
        said = _made_turn(renderer, tools)
        parsed = renderer.parse(said, specs=tools)
        new = renderer.answers(parsed.calls, [ToolResult("(its result)") for _ in parsed.calls])
        if parsed.error is not None:  # a format may have no call of this tool
            new = renderer.complaint(parsed.error)
        lines += _shown(f"a made call of {tools[0].name}", renderer, said)
        following = renderer.extend([*ids, *said], [*opening, parsed.message, *new], new, tools)
        if following is None:
            lines += _shown(
                "its answer, in a new row", renderer, renderer.open([*opening, parsed.message, *new], tools)
            )
        else:
            lines += _shown("its answer", renderer, following)
    return "\n".join(lines)


def _shown(title: str, renderer: TemplateRenderer, ids: list[int]) -> list[str]:
    text: Any = renderer.tokenizer.decode(ids, skip_special_tokens=False)
    return ["", f"--- {title}: {len(ids)} ids", text, f"--- {ids}"]


def _made_turn(renderer: TemplateRenderer, specs: list[ToolSpec]) -> list[int]:
    """Return the ids of a turn that calls the first tool."""
    parser, behaviour = renderer.parser, renderer.behaviour
    calls = [(specs[0].name, _made_arguments(specs[0]))]
    written = parser.write(calls, specs)
    if isinstance(parser, NativeParser) and renderer.tokenizer.get_added_vocab().keys() >= set(parser.marks):
        written = parser.write_as_content(calls, specs)
    closing = behaviour.closings.of(parser.native)
    opened = behaviour.tags[1] + "\n\n" if behaviour.opens_reasoning else ""
    return [*renderer.encode(opened + written + closing.before), renderer.end_of(calls=parser.native)]


def _made_arguments(spec: ToolSpec) -> dict[str, Any]:
    """Return arguments of the kinds that a tool's schema has, the required ones or all."""
    known = parameters(spec)
    names = spec.parameters.get("required") or list(known)
    return {name: _made_value(known.get(name, {}), name) for name in names}


def _made_value(schema: Any, name: str) -> Any:
    kinds = schema.get("type") if isinstance(schema, dict) else None
    choices = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(choices, list) and choices:
        return choices[0]
    return _MADE.get(kinds[0] if isinstance(kinds, list) and kinds else str(kinds), f"({name})")

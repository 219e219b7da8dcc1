"""Preview of a chain's first prompt, with a sample tool call and its result, as text and token ids."""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from agentfactory.base.messages import Message, ToolResult, ToolSpec, properties_of, required_of
from agentfactory.rollout.chains.opening_prompt import opening_messages
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.data.nulls import Nulls, drop_from_history
from agentfactory.rollout.images.task_images import TaskImages
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.text.parsers import Call, NativeParser
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.tools.sessions.toolset import open_toolset

_MADE: dict[str, Any] = {"integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}, "null": None}


async def describe_first_prompt(
    recipe: RolloutRecipe, task: Task, images: Path, base: Path = Path(), most: int | None = None
) -> AsyncIterator[str]:
    """Start a chain of a recipe on `task`, and yield the parts of `describe_prompt` for its prompt. `images` is the
    folder for the chain's images. Raise ValueError or ToolInfrastructureError if the prompt cannot be shown."""
    rollout = recipe.rollout
    task = task if {"question", "messages"} & task.keys() else {**task, "question": "(the question of a task)"}
    async with open_toolset(recipe, base) as toolset:
        toolset.give_to_user(rollout.user_tools)
        renderer = load_renderer(
            recipe.model,
            rollout.parser,
            reasoning=rollout.reasoning,
            tools=bool(toolset.specs),
            base=base,
            images=images,
        )
        task_images = TaskImages(recipe, renderer.images)
        task = await task_images.take(task, "data") if renderer.images.shows else task
        task = task_images.for_tools(task, toolset.takes) if task_images.view else task
        async with toolset.chain("prompt", task) as session:
            messages = opening_messages(drop_from_history(task, toolset.specs, Nulls()), rollout.system_prompt)
            if session.opening:
                messages += await renderer.images.take_messages([{"role": "user", "content": session.opening}])
            if rollout.assistant_prefix:
                yield f"each turn begins with rollout.assistant_prefix: {rollout.assistant_prefix!r}"
            for part in describe_prompt(renderer, messages, task_images.describe(toolset.specs), most):
                yield part


def describe_prompt(
    renderer: Renderer, messages: Sequence[Message], specs: Sequence[ToolSpec], most: int | None = None
) -> Iterator[str]:
    """Yield parts of a description of the first prompt: the tool-call format and its reasons; text and ids of the
    prompt, a sample call and its result, shortened to `most` characters. Raise ValueError if it cannot be rendered."""
    info = renderer.info
    stops = [f"{renderer.tokenizer.decode([token])!r} ({token})" for token in renderer.stop_token_ids]
    stops += [repr(stop) for stop in renderer.stops]
    lines = [
        f"format: {info['parser']}",
        f"template: {info['template']}, sha256 {info['template_sha256'][:12]}",
        f"rows: {info['choice']}: {info['rows']}",
        f"a turn ends with: {', '.join(stops)}",
    ]
    yield "\n".join([*lines, *(f"because: {reason}" for reason in info["reasons"])])
    tools = list(specs)

    def shown(title: str, ids: list[int], said: Sequence[Message] = ()) -> str:
        text: Any = renderer.tokenizer.decode(ids, skip_special_tokens=False)
        ids, _ = renderer.images.expand(ids, said)
        return f"\n--- {title}: {len(ids)} ids\n{_short(text, most)}\n--- {_short(str(ids), most and most // 6)}"

    opening = renderer.dialogue.instruct(messages, tools)
    ids = renderer.open(opening, tools)
    yield shown("the first prompt", ids, opening)
    if not tools:
        return
    call, said = _made_turn(renderer, tools)
    yield shown(f"a sample call of {call[0]}", said)
    parsed = renderer.parse(said, specs=tools)
    if parsed.calls == []:
        raise ValueError(f"the format cannot parse its own call of {call[0]}: {parsed.error}")
    new = renderer.dialogue.answers(parsed.calls, [ToolResult("(its result)") for _ in parsed.calls])
    conversation = [*opening, parsed.message, *new]
    following = renderer.extend([*ids, *said], conversation, new, tools)
    if following is None:
        yield shown("its result, in a new row", renderer.open(conversation, tools), conversation)
    else:
        yield shown("its result", following)


def _short(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[len(text) - half :]}"


def _made_turn(renderer: Renderer, specs: list[ToolSpec]) -> tuple[Call, list[int]]:
    """Return a sample call of the first tool that the format can call, and a turn's ids. Raise ValueError if none."""
    parser, behaviour = renderer.parser, renderer.behaviour
    problem: ValueError | None = None
    for spec in specs:
        known = properties_of(spec.parameters)
        names = required_of(spec.parameters) or list(known)
        call = spec.name, {name: _made_value(known.get(name, {}), name) for name in names}
        try:
            written = parser.write([call], specs)
        except ValueError as error:
            problem = problem or error
            continue
        if isinstance(parser, NativeParser) and renderer.tokenizer.get_added_vocab().keys() >= set(parser.marks):
            written = parser.write_as_content([call], specs)
        opened = behaviour.tags[1] + "\n\n" if behaviour.opens_reasoning else ""
        closing = behaviour.closings.of(parser.native).before
        return call, [*renderer.encode(opened + written + closing), renderer.ends[parser.native]]
    raise ValueError(f"the format cannot write a call of any of these tools: {problem}")


def _made_value(schema: Any, name: str) -> Any:
    given = schema if isinstance(schema, dict) else {}
    kinds, choices = given.get("type"), given.get("enum")
    if isinstance(choices, list) and choices:
        return choices[0]
    return _MADE.get(kinds[0] if isinstance(kinds, list) and kinds else str(kinds), f"({name})")

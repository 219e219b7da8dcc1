"""Every model family in its own format: recognised, written, parsed back, and with its own template's ids."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.messages import Message, ToolCall, ToolSpec
from agentfactory.rollout.chains.prompt_preview import describe_prompt
from agentfactory.rollout.text.probing.tool_probe import turn_start
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.text.templates import RenderError
from tests.model_families import FAMILIES, REFUSED, Family, renderer_of, table

by_template = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
_TYPES = {
    **{"text": "string", "count": "integer", "real": "number", "flag": "boolean", "none": "null"},
    **{"items": "array", "map": "object"},
}
_PROPERTIES = {name: {"type": kind} for name, kind in _TYPES.items()}
SPECS = [
    ToolSpec("do_it", "Does it.", {"type": "object", "properties": _PROPERTIES}),
    ToolSpec("look", "Looks.", {"type": "object", "properties": {}}),
]
VALUES: dict[str, list[Any]] = {
    "text": ["rain", "é 😀 中文", "3", "two\nlines", "", "a b"],
    "count": [0, -7, 10**12],
    "real": [0.5, -1e-3],
    "flag": [True, False],
    "none": [None],
    "items": [[], [1, "a", None, True], [[2], {"b": "c"}]],
    "map": [{}, {"a": 1, "b": [False, None]}, {"c": {"d": "é"}}],
}


def conversation(renderer: Renderer, rng: random.Random) -> list[Message]:
    """Turns with zero, one or several calls, with and without words and reasoning, and the messages after them."""
    behaviour = renderer.behaviour
    messages: list[Message] = [{"role": "user", "content": rng.choice(["Will it rain?", "¿Lloverá? 😀"])}]
    if behaviour.system and rng.random() < 0.5:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    number = 0
    for _ in range(rng.randint(1, 4)):
        count = rng.choice([0, 1, 1, 2, 3])
        count = count if behaviour.parallel_calls else min(count, 1)
        calls = []
        for _ in range(count):
            name = rng.choice(["do_it", "do_it", "look"])
            keys = sorted(rng.sample(sorted(VALUES), rng.randint(0, 4))) if name == "do_it" else []
            given = {key: rng.choice(VALUES[key]) for key in keys}
            calls.append(ToolCall(renderer.parser.call_id(name, number), name, given))
            number += 1
        words = rng.choice(["", "I look.", "Voilà: 中"]) if count else "It will."
        turn: Message = {"role": "assistant", "content": words if behaviour.words_with_calls or not count else ""}
        if behaviour.reasoning and rng.random() < 0.5:
            turn["reasoning_content"] = "Why not?"
        if calls:
            turn["tool_calls"] = [call.to_openai() for call in calls]
        messages.append(turn)
        messages += [
            {"role": "tool", "name": c.name, "tool_call_id": c.id, "content": rng.choice(["ok", "{}", "è\n1"])}
            for c in calls
        ]
        if not calls:
            messages.append({"role": "user", "content": "And now?"})
    return messages


def as_written(renderer: Renderer, messages: list[Message]) -> str | None:
    """What the template writes for the last message, an assistant's turn, as a model would sample it; None if it
    cannot say that."""
    specs = [spec.to_openai() for spec in SPECS]
    opened = renderer.template.render(messages[:-1], specs, prompt=True)
    closed = renderer.template.render(messages, specs)
    turn, tags = messages[-1], renderer.behaviour.tags
    if not closed.startswith(opened.removesuffix(renderer.behaviour.generation_prompt)):
        return None  # appending the turn changes the prompt itself
    said = closed[turn_start(opened, closed) :]
    closing = renderer.behaviour.closings.of(turn.get("tool_calls")).text
    if closing and not said.endswith(closing):
        return None
    said = said[: len(said) - len(closing)]
    if renderer.behaviour.opens_reasoning and not closed.startswith(opened) and not said.startswith(tags):
        said = tags[1] + said
    if "reasoning_content" in turn and turn["reasoning_content"] not in said:
        return None
    return said


@by_template
def test_30_conversations_are_written_and_read_back(family: Family) -> None:
    renderer = renderer_of(family)
    assert renderer.info["parser"] == family.parser
    assert renderer.behaviour.misprint is None, "the template shows the calls that it writes"
    rng = random.Random(family.name)
    turns, calls = 0, 0
    for _ in range(30):
        messages = conversation(renderer, rng)
        at_turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for at in at_turns[:1] if family.odd else at_turns:
            said = as_written(renderer, messages[: at + 1])
            if said is None:
                continue
            expected = messages[at]
            made = [call["function"] for call in expected.get("tool_calls") or []]
            ids = renderer.tokenizer(said, add_special_tokens=False)["input_ids"]
            end = renderer.stop_token_ids[0]
            parsed = renderer.parse([*ids, end], specs=SPECS)
            assert parsed.error is None, (parsed.error, said)
            assert [(c.name, c.arguments) for c in parsed.calls] == [(f["name"], f["arguments"]) for f in made], said
            # reasoning, though empty, stays in the content if the template has no field for it
            content = parsed.message["content"].removeprefix(renderer.behaviour.tags[1])
            assert content == expected["content"], said
            if "reasoning_content" in expected:
                assert parsed.message["reasoning_content"] == expected["reasoning_content"]
            turns, calls = turns + 1, calls + len(made)
    assert turns >= 30
    assert calls > 15


@by_template
def test_prompts_have_the_ids_that_the_template_gives(family: Family) -> None:
    renderer = renderer_of(family)
    template, rng, same = renderer.template, random.Random(family.name), 0
    for _ in range(30):
        messages = conversation(renderer, rng)
        messages = messages[: max(i for i, m in enumerate(messages) if m["role"] != "assistant") + 1]
        # our own tool description spells the format's tokens as characters
        instructed = renderer.dialogue.instruct(messages, SPECS) if renderer.behaviour.shows_tools else messages
        taken = json.loads(json.dumps(instructed))
        for message in taken:
            if "reasoning_content" in message:
                message[template.reasoning_field] = message.pop("reasoning_content")
            for call in message.get("tool_calls") or []:
                if template.arguments_as_text:
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            if template.null_content and message.get("tool_calls") and message["content"] == "":
                message["content"] = None
            if template.write_calls is not None and message.get("tool_calls"):
                written = template.write_calls(message.pop("tool_calls"))
                message["content"] = "\n".join(part for part in (message["content"], written) if part)
        if template.tools_in_system:
            system = taken.pop(0) if taken[0]["role"] == "system" else {"role": "system", "content": ""}
            functions = [spec.to_openai()["function"] for spec in SPECS]
            taken.insert(0, {**system, "tools": json.dumps(functions, ensure_ascii=False)})
        whole = renderer.tokenizer.apply_chat_template(
            taken, tools=[spec.to_openai() for spec in SPECS], chat_template=template.source, add_generation_prompt=True
        )["input_ids"]
        assert renderer.open(instructed, SPECS) == whole
        same += 1
    assert same == 30


@pytest.mark.parametrize("name", REFUSED)
def test_families_without_native_calls_are_refused_with_the_reason(name: str) -> None:
    template, reason = REFUSED[name]
    with pytest.raises(RenderError, match=f"{reason}.*rollout.parser=json or react"):
        renderer_of(Family(name, template, ""))


@by_template
def test_the_first_prompt_is_shown_with_a_made_call_and_its_answer(family: Family) -> None:
    renderer = renderer_of(family)
    opening: list[Message] = [{"role": "user", "content": "Will it rain?"}]
    text = "\n".join(describe_prompt(renderer, opening, SPECS))
    assert text.startswith(f"format: {family.parser}\n")
    assert f"because: rollout.parser=auto: {family.parser} reads the calls" in text
    prompt = renderer.open(renderer.dialogue.instruct(opening, SPECS), SPECS)
    assert f"--- the first prompt: {len(prompt)} ids\n{renderer.tokenizer.decode(prompt)}\n--- {prompt}\n" in text
    _, _, made = text.partition("--- a sample call of do_it: ")
    call, _, answer = made.partition("--- its result")
    assert "(text)" in call
    assert "(its result)" in answer


def test_the_table_of_the_documentation() -> None:
    page = Path(__file__).parents[2].joinpath("docs/tool-call-formats.md").read_text(encoding="utf-8")
    assert table() in page, f"put this table into docs/tool-call-formats.md:\n\n{table()}"

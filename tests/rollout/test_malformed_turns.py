"""Messages to the model about malformed turns in each model family's format."""

import json

import pytest

from agentfactory.base.messages import Message, ToolSpec
from agentfactory.rollout.text.parsers import NativeParser
from agentfactory.rollout.text.renderer import Parsed, Renderer
from tests.model_families import FAMILIES, Family, renderer_of

by_template = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
NOTE = ToolSpec("note", "Note.", {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})


def written(renderer: Renderer, *names: str, thought: str = "") -> str:
    """A turn that calls these tools, as a model samples it."""
    parser, behaviour = renderer.parser, renderer.behaviour
    calls = [(name, {"text": "rain"}) for name in names]
    text = parser.write(calls, [NOTE])
    if isinstance(parser, NativeParser) and renderer.tokenizer.get_added_vocab().keys() >= set(parser.marks):
        text = parser.write_as_content(calls, [NOTE])
    if thought:
        return f"{'' if behaviour.opens_reasoning else behaviour.tags[0]}{thought}{behaviour.tags[1]}{text}"
    return f"{behaviour.tags[1] if behaviour.opens_reasoning else ''}{text}"


def read(renderer: Renderer, text: str) -> tuple[list[int], Parsed]:
    ids = [*renderer.encode(text), renderer.ends[True]]
    return ids, renderer.parse(ids, specs=[NOTE])


def check_told(renderer: Renderer, text: str, reason: str, form: bool = False) -> None:
    """The turn is malformed for `reason`, and the next prompt says so."""
    ids, parsed = read(renderer, text)
    assert parsed.error is not None, text
    assert reason in parsed.error
    assert not parsed.calls
    if form:
        assert renderer.parser.form([NOTE])[:20] in parsed.error
    opening: list[Message] = renderer.dialogue.instruct([{"role": "user", "content": "go"}], [NOTE])
    new = renderer.dialogue.complaint(parsed.error)
    prompt = renderer.open(opening, [NOTE])
    following = renderer.extend([*prompt, *ids], [*opening, parsed.message, *new], new, [NOTE])
    if following is None:  # a new row
        following = renderer.open([*opening, parsed.message, *new], [NOTE])
    told = renderer.tokenizer.decode(following)
    said = parsed.error if parsed.error in told else json.dumps(parsed.error, ensure_ascii=False)[1:-1]
    assert said in told


@by_template
def test_a_call_that_was_cut_is_told(family: Family) -> None:
    renderer = renderer_of(family)
    text = written(renderer, "note")
    reason = "A message begins with" if family.parser == "harmony" else "Malformed tool call 1: "
    check_told(renderer, text[: text.index("rain") - (12 if family.parser == "harmony" else 0)], reason, form=True)


@by_template
def test_a_token_that_frames_others_turns_is_told(family: Family) -> None:
    renderer = renderer_of(family)
    foreign = list(renderer._foreign.values())
    if family.parser == "harmony":  # its turns have every token of the format: a turn of another role is malformed
        text = "<|channel|>final<|message|>3<|end|><|start|>user<|message|>And?"
        check_told(renderer, text, "write <|start|>assistant")
        return
    assert foreign
    for token in foreign[:3]:
        check_told(renderer, f"It rains.{token}user", f"The turn has {token}, which only others' turns begin with")


def test_a_call_inside_the_reasoning_is_told() -> None:
    told = 0
    for family in FAMILIES:
        renderer = renderer_of(family)
        behaviour = renderer.behaviour
        if family.parser == "harmony":  # a message has one channel and one recipient
            text = "<|channel|>analysis<|message|>" + renderer.parser.write([("note", {"text": "rain"})], [NOTE])
            assert read(renderer, text)[1].calls == []
        elif behaviour.reasoning or behaviour.opens_reasoning:
            text = written(renderer, "note").removeprefix(behaviour.tags[1])
            opening = "" if behaviour.opens_reasoning else behaviour.tags[0]
            reason = f"The tool call is inside the reasoning: write {behaviour.tags[1]}"
            check_told(renderer, f"{opening}I note: {text}", reason)
            told += 1
    assert told > 10


@by_template
def test_two_calls_are_told_where_the_format_has_one(family: Family) -> None:
    renderer = renderer_of(family)
    text = written(renderer, "note", "note")
    if renderer.behaviour.parallel_calls:
        assert [call.name for call in read(renderer, text)[1].calls] == ["note", "note"]
    else:
        check_told(renderer, text, "This turn has 2 tool calls: write one at a time, and wait for its result.")

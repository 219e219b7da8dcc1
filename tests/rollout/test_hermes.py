import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfactory.rollout.text.parsers import Reading
from agentfactory.rollout.text.parsers.formats.hermes import Hermes


def parse_calls(text: str) -> Reading:
    return Hermes().parse(text)


CALL = '<tool_call>\n{"name": "move", "arguments": {"direction": "north"}}\n</tool_call>'


def test_calls_and_the_words_around_them() -> None:
    found = parse_calls(f"I go.\n{CALL}\n{CALL}\nSo be it.")
    assert found.calls == [("move", {"direction": "north"})] * 2
    assert found.content == "I go.\nSo be it."
    assert found.error is None


def test_text_without_calls_is_content() -> None:
    assert parse_calls("  An answer with { braces }.\n").content == "An answer with { braces }."
    assert parse_calls("").calls == []


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', {"a": 1}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": {}, "id": 7}', {}),
        ('{"name": "f", "arguments": {"s": "</tool_call> <tool_call> {"}}', {"s": "</tool_call> <tool_call> {"}),
        ('{"name": "f", "arguments": {"s": "\\ud83d\\ude00 \\u00e9"}}', {"s": "😀 é"}),
        ('{"name":"f","arguments":{"deep":[[{"x":null}],true,-1.5e3]}}', {"deep": [[{"x": None}], True, -1500.0]}),
    ],
)
def test_forms_of_a_call(body: str, arguments: dict) -> None:
    assert parse_calls(f"<tool_call>{body}</tool_call>").calls == [("f", arguments)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>{"name": "f", "arguments": {}', "not valid JSON"),
        ('<tool_call>{"name": "f", "arguments": {}}', "no </tool_call> after"),
        ('<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', "no </tool_call> after"),
        ("<tool_call>", "not valid JSON"),
        ("<tool_call>move north</tool_call>", "not valid JSON"),
        ("<tool_call>{'name': 'f'}</tool_call>", "not valid JSON"),
        ('<tool_call>["f"]</tool_call>', "expected a JSON object, not an array"),
        ("<tool_call>null</tool_call>", "expected a JSON object, not null"),
        ('<tool_call>{"arguments": {}}</tool_call>', '"name" is missing'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', '"name" must be a non-empty string'),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', '"name" must be a non-empty string'),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', '"arguments" must be a JSON object, not a string'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '"arguments" must be a JSON object, not an array'),
        ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', '"arguments" is missing, but there is "parameters"'),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
        ('<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "too large"),
        ('<tool_call>{"name": "f", "arguments": {"x": 1, "x": 2}}</tool_call>', "the key 'x' is given twice"),
        ('<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>', "the key 'name' is given twice"),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\ud83d"}}</tool_call>', "surrogate"),
        ('{"name": "f", "arguments": {}}</tool_call>', "</tool_call> without <tool_call>"),
        ("<tool_call>" + '{"a":' * 100_000, "nested too deeply"),
        # far from Python's limit, but others who pass the arguments on may be nearer to it
        (
            '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 150 + "1" + "}" * 151 + "</tool_call>",
            "nested too deeply",
        ),
        ('<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 10_000 + "}}</tool_call>", "not valid JSON"),
    ],
)
def test_malformed_calls_say_what_is_wrong(text: str, reason: str) -> None:
    found = parse_calls(text)
    assert found.error is not None
    assert reason in found.error
    assert "<tool_call>" in found.error, "shows the right form"
    assert found.calls == []
    assert found.content == text.strip(), "the turn stays as it was written"


def test_one_malformed_call_executes_none() -> None:
    found = parse_calls(f"{CALL}<tool_call>oops</tool_call>")
    assert found.calls == []
    assert found.error is not None
    assert found.error.startswith("Malformed tool call 2:")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=3)), max_size=3))
def test_every_well_formed_call_is_read_back(calls: list[tuple[str, dict]]) -> None:
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    found = parse_calls("Well.\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written))
    assert found.error is None
    assert found.calls == calls
    assert found.content == "Well."

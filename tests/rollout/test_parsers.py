"""Every tool-call format: accepted and refused turns, written turns, and robustness against any model output."""

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentfactory.base.messages import ToolCall, ToolResult, ToolSpec
from agentfactory.rollout.text.parsers import PARSERS, Call, Reading, load_parser
from agentfactory.rollout.text.parsers.values import MAX_LITERAL


def spec(name: str, required: list[str] | None = None, /, **properties: Any) -> ToolSpec:
    told = {"type": "object", "properties": properties, "required": list(properties) if required is None else required}
    return ToolSpec(name, f"{name} does a thing.", told)


STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
SPECS = [
    spec("search", query=STRING),
    spec("move", ["to"], to=STRING, by=INTEGER, far={"type": "boolean"}),
    spec("add", a=NUMBER, b={"anyOf": [{"type": "integer"}, {"type": "null"}]}),
    spec("put", items={"type": "array", "items": STRING}, where={"type": "object"}),
    spec("look"),
    spec("python", code=STRING),
]


CALLS: list[list[Call]] = [
    [("search", {"query": "rain in\nMay"})],
    [("move", {"to": "north", "by": 2, "far": True})],
    [("add", {"a": -1.5, "b": None})],
    [("put", {"items": ["a", 'b"]', "</tool_call>"], "where": {"x": {"y": [1, None, False]}}})],
    [("look", {})],
    [("python", {"code": "for i in range(3):\n    print(f'{i}', \"<b>\")"})],
    [("search", {"query": "é😀 \\ '"}), ("look", {}), ("move", {"to": "<parameter=by>"})],
]


def examples(name: str) -> list[str]:
    """Turns in the format, and malformed ones."""
    parser = load_parser(name)
    texts = ["", "A plain answer.", parser.write_answer("42")]
    for calls in CALLS:
        try:
            written = parser.write(calls, SPECS)
        except ValueError:
            continue
        texts += [written, f"I go.\n{written}", f"{written}\n{written}"]
    return texts


# --- each format -----------------------------------------------------------------------------------------------------


def xml(name: str, **values: str) -> str:
    """A call in Qwen3-Coder's format, without line breaks between tags."""
    given = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    return f"<tool_call><function={name}>{given}</function></tool_call>"


def seed(name: str, **values: str) -> str:
    return xml(name, **values).replace("tool_call>", "seed:tool_call>")


LOOK: list[Call] = [("look", {})]
RAIN: list[Call] = [("search", {"query": "rain"})]
READ: dict[str, list[tuple[str, list[Call], str]]] = {
    "hermes": [
        (
            'I go.\n<tool_call>\n{"name": "look"}\n</tool_call>\n<tool_call>{"arguments": {"a": 1}, "name": "f"}'
            "</tool_call>\nSo be it.",
            [("look", {}), ("f", {"a": 1})],
            "I go.\nSo be it.",
        ),
        (
            '<tool_call>{"name":"f","arguments":{"deep":[[{"x":null}],-1.5e3],"s":"</tool_call>\\ud83d\\ude00"}}</tool_call>',
            [("f", {"deep": [[{"x": None}], -1500.0], "s": "</tool_call>😀"})],
            "",
        ),
    ],
    "qwen3_coder": [
        (
            "I go.\n" + xml("move", to="\nnorth\n", by="\n2\n", far="\nFalse\n").replace("><", ">\n<"),
            [("move", {"to": "north", "by": 2, "far": False})],
            "I go.",
        ),
        (xml("add", a="1", b="None"), [("add", {"a": 1, "b": None})], ""),
        (xml("python", code="\nx = '</parameter>'\n\n\n"), [("python", {"code": "x = '</parameter>'\n\n"})], ""),
        # nothing is known of these: their values stay text
        (xml("fly", by="2") + xml("move", via="3"), [("fly", {"by": "2"}), ("move", {"via": "3"})], ""),
        # a value that does not match the schema stays text, and the tool reports it
        (xml("move", by="two"), [("move", {"by": "two"})], ""),
    ],
    "llama3_json": [
        ('{"name": "search", "parameters": {"query": "rain"}}', RAIN, ""),
        ('<|python_tag|>{"name": "look"}', LOOK, ""),
        ('{"name": "look", "parameters": {}}; {"name": "look", "arguments": {}}', [("look", {}), ("look", {})], ""),
    ],
    "pythonic": [
        ("[search(query='rain'), look()]", [("search", {"query": "rain"}), ("look", {})], ""),
        (
            'I go.<|tool_call_start|>[move(to="north", by=-2, far=True)]<|tool_call_end|>Now.',
            [("move", {"to": "north", "by": -2, "far": True})],
            "I go.\nNow.",
        ),
        (
            '[put(items=["a", \'b\'], where={"x": [true, null, (1, .5)]},)]',
            [("put", {"items": ["a", "b"], "where": {"x": [True, None, [1, 0.5]]}})],
            "",
        ),
        (
            r"[python(code='''a = 1" + "\n" + r"b''', z='\x41\u00e9\ud83d\ude00\q\'', r=r'\d', from=007)]",
            [("python", {"code": "a = 1\nb", "z": "Aé😀\\q'", "r": "\\d", "from": 7})],
            "",
        ),
        (
            '<|tool_call_start|>[{"name": "look", "arguments": {}, "id": "1"}, {"name": "search", "arguments": '
            '{"query": "rain"}}]<|tool_call_end|>',
            [("look", {}), ("search", {"query": "rain"})],
            "",
        ),
    ],
    "seed_oss": [
        (
            "I go.\n" + seed("put", items="['a', None]", where="{'x': True}").replace("><", ">\n<"),
            [("put", {"items": ["a", None], "where": {"x": True}})],
            "I go.",
        )
    ],
    "apertus": [
        # the closing token may be the end-of-turn token, which the text does not include
        ('I go.<|tools_prefix|>[{"look": {}}, {"move": {"to": "n"}}]', [("look", {}), ("move", {"to": "n"})], "I go."),
        ('<|tools_prefix|>[{"look": {}}]<|tools_suffix|>\n', LOOK, ""),
    ],
    "cohere": [
        (
            '<|START_TEXT|>I go.<|END_TEXT|><|START_ACTION|>[\n    {"tool_call_id": "3", "tool_name": "search", '
            '"parameters": {"query": "<|END_TEXT|>"}}\n]<|END_ACTION|>',
            [("search", {"query": "<|END_TEXT|>"})],
            "I go.",
        ),
        ("<|START_RESPONSE|>It is 3.<|END_RESPONSE|>", [], "It is 3."),
    ],
    "gigachat": [('I go.<|function_call|>{"name": "look", "arguments": {}}', LOOK, "I go.")],
    "functionary": [
        (
            'I go.<function=look>{}</function><function=add>{"a": 1}</function>',
            [("look", {}), ("add", {"a": 1})],
            "I go.",
        ),
        (
            'I go.<function=look>{}</function><|python_tag|>{"code": "print(1)\\n"}',
            [("look", {}), ("python", {"code": "print(1)\n"})],
            "I go.",
        ),
        ('<|python_tag|>{"a": 1}["a"]', [("python", {"code": '{"a": 1}["a"]'})], ""),
    ],
    "react": [
        ('Thought: rain?\nAction: search\nAction Input: {"query": "rain"}', RAIN, "rain?"),
        ("Action: search\nAction Input: rain in May\n", [("search", {"query": "rain in May"})], ""),
        ("Action: python\nAction Input:\nfor i in []:\n    i", [("python", {"code": "for i in []:\n    i"})], ""),
    ],
    "json": [
        ('I go.\n```json\n{"name": "look", "arguments": {}}\n```\nThen.', LOOK, "I go.\nThen."),
        ('I go. {"name": "look", "parameters": {}} Then.', LOOK, "I go.\nThen."),
        (
            '```\n[{"name": "search", "arguments": {"query": "```"}},\n {"name": "look", "arguments": {}}]\n```',
            [("search", {"query": "```"}), ("look", {})],
            "",
        ),
        # as templates show it whose braces are doubled by mistake
        ('{{"name": "move", "arguments": {"to": "n"}}}', [("move", {"to": "n"})], ""),
        ('{{"name": "move", "arguments": {"to": "n"}} ok', [("move", {"to": "n"})], "ok"),
        (
            '{"type": "function", "function": {"name": "fly", "arguments": {}}}',
            [("fly", {})],
            '{"type": "function", "function":\n}',
        ),
    ],
    "code_block": [
        ("I count.\n```python\nprint(1)\n```\nThen.", [("python", {"code": "print(1)"})], "I count.\nThen."),
        ("```py\na = 1\n```\n```python\na\n```", [("python", {"code": "a = 1\n\na"})], ""),
        ("```python\ns = '''\n```sql\n'''\n```", [("python", {"code": "s = '''\n```sql\n'''"})], ""),
        ("````python\ns = '''\n```\n'''\n````", [("python", {"code": "s = '''\n```\n'''"})], ""),
    ],
    "tags": [
        ("<think>?</think><search> rain </search>", RAIN, "<think>?</think>"),
        ('<move>{"to": "north", "by": 2}</move>', [("move", {"to": "north", "by": 2})], ""),
        ("<move>north</move>\n<look></look>", [("move", {"to": "north"}), ("look", {})], ""),
        ('<search>{"a": 1}</search>', [("search", {"query": '{"a": 1}'})], ""),
    ],
}


WORDS = {
    "hermes": ["An answer with { braces }."],
    "llama3_json": ['{"answer": 3}', '{"name": "Ada"}', "{ the set of all }", "It is 3."],
    "pythonic": ["[a list](of links)", "[1, 2]"],
    "json": [
        *('{"name": "Ada"}', '{"name": "look", "age": 3}', '{"parameters": {"a": 1}}', '{"name": [', "It is {3}."),
        '```python\nf({"name": "look", "arguments": {}})\n```',
    ],
    "code_block": ["```\n$ ls\n```", "It is 3."],
}
"""Turns without a call."""


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WORDS.items() for text in texts])
def test_words_stay_words(name: str, text: str) -> None:
    assert load_parser(name).parse(f" {text}\n", SPECS) == Reading(text)


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"), [(n, *case) for n, cases in READ.items() for case in cases]
)
def test_forms_that_are_read(name: str, text: str, calls: list[Call], content: str) -> None:
    assert load_parser(name).parse(text, SPECS) == Reading(content, calls)


def test_final_answers() -> None:
    react, tags = load_parser("react"), load_parser("tags")
    assert react.parse("Thought: so\nFinal Answer: it is\nThought: 3", SPECS).answer == "it is\nThought: 3"
    assert tags.parse("So. <answer> 3 </answer>", SPECS) == Reading("So.", answer="3")
    assert tags.parse("<answer>2</answer> no <answer>3</answer>", []).answer == "3", "the last word"
    for parser in (react, tags):
        assert parser.parse(parser.write_answer(" 3 "), SPECS).answer == "3"


ARGUMENTS = {
    "{}": "not valid JSON",
    '"{}"}': '"arguments" must be a JSON object, not a string',
    '{"x": NaN}}': "NaN is not JSON",
    '{"x": 1e999}}': "too large",
    '{"x": 1, "x": 2}}': "the key 'x' is given twice",
    '{"x": "\\ud83d"}}': "surrogate",
    # far from Python's limit, but others who pass the arguments on may be nearer to it
    '{"a":' * 150 + "1" + "}" * 151: "nested too deeply",
    '{"x": ' + "9" * 10_000 + "}}": "not valid JSON",
    "{}} and more": "no </tool_call> after",
}
BODIES = {
    "": "not valid JSON",
    "move north": "not valid JSON",
    '{"arguments": {}}': '"name" is missing',
    '{"name": 3, "arguments": {}}': '"name" must be a non-empty string',
    '{"name": "f", "parameters": {}}': '"arguments" is missing, but there is "parameters"',
    '{"name": "f", "name": "g", "arguments": {}}': "the key 'name' is given twice",
    '{"name": "look"}</tool_call><tool_call>oops': "Malformed tool call 2: not valid JSON",
}
REFUSED = {
    "hermes": [
        *((f'<tool_call>{{"name": "f", "arguments": {text}</tool_call>', why) for text, why in ARGUMENTS.items()),
        *((f"<tool_call>{body}</tool_call>", reason) for body, reason in BODIES.items()),
        ('<tool_call>{"name": "f", "arguments": {}}', "no </tool_call> after"),
        ('{"name": "f", "arguments": {}}</tool_call>', "</tool_call> without <tool_call>"),
        ("<tool_call>" + '{"a":' * 100_000, "nested too deeply"),
    ],
    "qwen3_coder": [
        ("<tool_call>", "no <function=name> after <tool_call>"),
        ("<tool_call><function=look></tool_call>", "no </function> after the parameters of look"),
        ("<tool_call><function=look></function>", "no </tool_call> after </function>"),
        ("<tool_call><function=f><parameter=a>1</function></tool_call>", "no </parameter> after the value of a"),
        (xml("f", a="1</parameter><parameter=a>1"), "the parameter a is given twice"),
        ("<function=look></function>", "<function= without <tool_call>"),
    ],
    "llama3_json": [
        ('{"name": "look", "parameters": {}', "not valid JSON"),
        ('I go. {"name": "look", "parameters": {}}', "nothing beside it"),
        ("<|python_tag|>print(1)", "not valid JSON"),
    ],
    "pythonic": [
        ("[look(]", "each argument of look has to be given as name=value"),
        ("[look()", "expected ',' at the end"),
        ("[look()] I went.", "nothing beside it"),
        ("[look(a=1, a=2)]", "the argument a of look is given twice"),
        ("[look(a=b)]", "expected a string at 'b)]'"),
        ("[look(a=0x1G)]", "is no number, or too large"),
        (f"[look(a={'9' * 5000})]", "is no number, or too large"),
        ("[look(a='\\ud83d')]", "an escape that is no character"),
        (f"[look(a={'[' * 5000})]", "nested too deeply"),
        ("<|tool_call_start|>[look()]", "no <|tool_call_end|> after the list"),
        ("[look()]<|tool_call_end|>", "<|tool_call_end|> without <|tool_call_start|>"),
        ("<|tool_call_start|>[]<|tool_call_end|>", "expected a name at"),
    ],
    "seed_oss": [("<seed:tool_call>", "no <function=name> after <seed:tool_call>")],
    "apertus": [
        ('<|tools_prefix|>[{"name": "look", "arguments": {}}]', "the tool's name as its only key, not 2 keys"),
        ('<|tools_prefix|>[{"look": 1}]', "the arguments of look must be a JSON object, not a number"),
        ('<|tools_prefix|>[{"look": {}}] I went.', "no <|tools_suffix|> after the list of calls"),
    ],
    "cohere": [
        ('<|START_ACTION|>[{"name": "look", "parameters": {}}]<|END_ACTION|>', '"tool_name" is missing'),
        ('<|START_ACTION|>[{"tool_name": "look", "a": {}}]<|END_ACTION|>', '"parameters" is missing, but there'),
        ('<|START_ACTION|>[{"tool_name": "look", "parameters": {}}]', "no <|END_ACTION|> after the list"),
    ],
    "gigachat": [
        ("<|function_call|>look", "not valid JSON"),
        ('<|function_call|>{"arguments": {}}', '"name" is missing'),
    ],
    "functionary": [
        ("<function=look>[]</function>", "the arguments must be a JSON object, not an array"),
        ("<function=look>{}", "no </function> after the JSON object"),
        ("<function=>{}</function>", "no tool's name and > after <function="),
    ],
    "react": [
        ("I wonder.", "neither an Action nor a Final Answer"),
        ("Action: look\nAction Input: {}\nThought: and?", "end with one Action and its Action Input"),
        ("Action: look\nAction Input: {}\n" * 2, "end with one Action and its Action Input"),
        ("Action: look\nAction Input: {}\nObservation: a wall", "those come from the tools"),
        ("Action: look\nAction Input: {}\nFinal Answer: 3", "an Action and a Final Answer"),
        ("Action:\nAction Input: {}", "the name of one tool"),
        ("Action: add\nAction Input: 3", "Action Input of add: expected a JSON object"),
    ],
    "json": [
        ('{"name": "look", "arguments": {}}\n[result of look]\na wall', "results come from the tools"),
        ('```json\n{"name": "look", "arguments": {}\n```', "not valid JSON"),
        ('{"name": "look", "arguments": {"a": 1, "a": 2}}', "the key 'a' is given twice"),
        ('{"name": "look", "arguments": {}} {"name": "look", "arguments": {]}', "not valid JSON"),
    ],
    "code_block": [("```python\nprint(1)", "without its closing line")],
    "tags": [
        ("I wonder.", "neither a call nor an <answer>"),
        ("<search>rain", "no </search> after <search>"),
        ("<answer>3", "no </answer>"),
        ("<search>rain</search><information>It rains.</information>", "results come from the tools"),
        ("<search>rain</search><answer>3</answer>", "a call and an <answer>"),
        ("<add>3</add>", "<add>: expected a JSON object with a, b"),
        ("<look>north</look>", "<look>: expected a JSON object with no arguments"),
    ],
}


@pytest.mark.parametrize(("name", "text", "reason"), [(n, *case) for n, cases in REFUSED.items() for case in cases])
def test_malformed_turns_say_what_is_wrong_and_how_it_is_right(name: str, text: str, reason: str) -> None:
    parser = load_parser(name)
    found = parser.parse(text, SPECS)
    assert reason in found.error
    assert found.error.endswith(parser.form(SPECS))
    assert found.calls == []
    assert found.answer is None
    assert found.content == text.strip(), "the turn stays as it was written"


def test_types_of_text_are_the_schemas() -> None:
    schema = {
        "$defs": {"Side": {"enum": ["left", "right"]}, "Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}},
        "properties": {
            "side": {"$ref": "#/$defs/Side"},
            "count": {"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]},
            "either": {"type": ["integer", "string"]},
            "text_first": {"type": ["string", "integer"]},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "anything": {},
            "loop": {"$ref": "#/$defs/Loop"},
            "one": {"const": 1},
            "flag": {"type": "boolean"},
            "real": {"type": "number"},
            "list": {"type": "array"},
            "object": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        },
        "additionalProperties": {"type": "integer"},
    }
    cases = [
        *(("count", "3", 3), ("count", "null", None), ("either", "3", 3), ("maybe", "None", None), ("further", "7", 7)),
        *(("anything", '{"a": [1]}', {"a": [1]}), ("loop", "1", 1), ("one", "1", 1), ("real", "1e3", 1000.0)),
        *(("flag", "True", True), ("flag", "false", False)),
        # Python's notation, which Jinja's `string` filter writes
        ("list", "['a', \"b's\", None, True, 1.5]", ["a", "b's", None, True, 1.5]),
        ("object", "{'a': {'b': [1]}}", {"a": {"b": [1]}}),
    ]
    kept = [
        *(("side", "left"), ("count", "three"), ("either", "x3"), ("text_first", "3"), ("maybe", "nothing")),
        *(("anything", "{a"), ("flag", "1"), ("real", "1e999"), ("real", "true"), ("side", "['left']")),
        *(("list", "['a'"), ("list", "[('a',)]"), ("list", "[open('x')]"), ("object", "{'a': 1, 'a': 2}")),
        *(("list", "[" * 5000 + "]" * 5000 + "'"), ("list", f"['{'a' * MAX_LITERAL}']")),
    ]
    cases += [(key, text, text) for key, text in kept]
    parser, specs = load_parser("qwen3_coder"), [ToolSpec("f", "", {"type": "object", **schema})]
    for key, text, value in cases:
        (found,) = parser.parse(xml("f", **{key: f"\n{text}\n"}), specs).calls
        assert found == ("f", {key: value}), (key, text)
        assert type(found[1][key]) is type(value)


# --- error messages --------------------------------------------------------------------------------------------------


def test_text_formats_tell_of_tools_results_and_errors_in_user_messages() -> None:
    calls = [ToolCall("call_0", "search", {}), ToolCall("call_1", "look", {})]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    results = [ToolResult("It rains.", info={"rank": 1}), ToolResult([image])]
    for name in ("react", "code_block", "json", "tags"):
        parser = load_parser(name)
        told = parser.instructions(SPECS)
        assert parser.form(SPECS) in told
        if name != "code_block":
            assert all(s.name in told and s.description in told for s in SPECS)
        assert parser.complaint("No.") == [{"role": "user", "content": "No."}]
        (message,) = parser.answers(calls, results)
        assert message["role"] == "user"
        assert message["info"] == {"rank": 1}
        assert image in message["content"]
    assert load_parser("tags").answers(calls, [ToolResult("a"), ToolResult("b")]) == [
        {"role": "user", "content": "<information>a</information>\n<information>b</information>"}
    ]


def test_tools_that_a_format_cannot_call_are_refused() -> None:
    with pytest.raises(ValueError, match=r"code_block needs one tool with a parameter `code`.*has none among search"):
        load_parser("code_block").instructions(SPECS[:1])
    with pytest.raises(ValueError, match="tags has <answer> for itself; fix: give the tool answer another name"):
        load_parser("tags").instructions([spec("answer", text=STRING)])
    assert load_parser("code_block").instructions([]) is None
    assert "<answer>" in (load_parser("tags").instructions([]) or "")


# --- write, then read ------------------------------------------------------------------------------------------------

UNQUOTED = ("qwen3_coder", "seed_oss", "glm", "harmony", "hy3", "minimax", "deepseek_v32", "deepseek_v4", "gemma4")
"""Formats whose text values stand between tags."""
text = st.text(st.characters(codec="utf-8"), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(text, children, max_size=3),
    max_leaves=8,
)


def called(name: str, given: dict[str, Any], **optional: Any) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(name), st.fixed_dictionaries(given, optional=optional))


known = st.one_of(
    called("search", {"query": text}),
    called("move", {"to": text}, by=st.integers(), far=st.booleans()),
    called("add", {"a": st.integers() | st.floats(-1e9, 1e9), "b": st.none()}),
    called("put", {"items": st.lists(text, max_size=3), "where": st.dictionaries(text, values, max_size=3)}),
    called("look", {}),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PARSERS if name not in ("code_block", "functiongemma")])
def test_what_is_written_is_read_back(name: str) -> None:
    parser = load_parser(name)

    @settings(max_examples=50, deadline=None)
    @given(st.lists(known, min_size=1, max_size=1 if name == "react" else 3))
    def check(calls: list[Call]) -> None:
        if name == "gemma4":  # its keys have no quotes
            calls = [(called, arguments | ({"where": {}} if called == "put" else {})) for called, arguments in calls]
        written = parser.write(calls, SPECS)
        # a value that is itself the end of a parameter is one that these formats cannot express
        assume(name not in UNQUOTED or not any("<" in str(arguments) for _, arguments in calls))
        found = parser.parse(written, SPECS)
        assert (found.content, found.calls, found.error) == ("", calls, None), written

    check()


# --- arbitrary text --------------------------------------------------------------------------------------------------

PIECES = [
    *("<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=a>", "</parameter>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<search>", "</search>", "<answer>", "</answer>", "<|python_tag|>"),
    *("Action:", "Action Input:", "\nThought:", "\nFinal Answer:", "\nObservation:", "```", "```python\n", "\n```\n"),
    *('"', "'", '"""', "{", "}", "[", "]", "(", ")", "\\", "\\u", "\\ud83d", "\\x4", "=", ":", ",", ";", "<", ">", "/"),
    *('{"name": ', '"parameters": ', '"arguments": ', "null", "None", "1e999", "-", ".", "9" * 20, "NaN", "\n", " "),
    *("<information>", "\0", "\ufdd0", "\ud800", "é", "😀", "\u2028", "\r", "look", "f'", "0x"),
]


def mutate(rng: random.Random, text: str, others: list[str]) -> str:
    """Splice, delete, duplicate, flip, truncate and nest."""
    for _ in range(rng.randint(1, 4)):
        a, b = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        piece, other = rng.choice(PIECES), rng.choice(others)
        changed = [
            text[:a] + piece + text[a:],
            text[:a] + text[min(b, a + 8) :],
            text[:b] + text[a:b] + text[b:],
            text[:a]
            + "".join(chr(ord(letter) ^ (1 << rng.randrange(8))) for letter in text[a : a + 1])
            + text[a + 1 :],
            text[:b],
            text[:a] + other[rng.randint(0, len(other)) :],
            text[:a] + other + text[b:],
            text[:a] + piece * rng.randint(2, 30) + text[b:],
        ]
        text = rng.choice(changed)
    return text


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_turns_are_text_and_calls_or_an_error(name: str) -> None:
    parser, count = load_parser(name), 3_000
    rng = random.Random(name)
    turns = examples(name)
    others = [other for n in PARSERS for other in examples(n)]
    seen = {"calls": 0, "error": 0, "words": 0}
    for _ in range(count):
        turn = mutate(rng, rng.choice(turns), others)
        found = parser.parse(turn, SPECS)
        assert isinstance(found.content, str)
        if found.error is not None:
            assert found.error
            assert (found.calls, found.answer, found.content) == ([], None, turn.strip())
        for called, arguments in found.calls:
            assert isinstance(called, str)
            assert isinstance(arguments, dict)
            assert called
            assert not found.answer
        seen["error" if found.error else "calls" if found.calls else "words"] += 1
        if found.calls:  # what is passed on can be passed on
            json.dumps(found.calls, allow_nan=False)
    assert min(seen.values()) > count / 1000, seen


def hostile(name: str, size: int) -> dict[str, str]:
    """Texts of `size` characters that would take a careless parser forever, or overflow its stack."""
    units = [
        *("<tool_call>", "</tool_call>", "<tool_call><function=look>", "</parameter>" + " " * 20, "<search>"),
        *("<search>{</search>", '<move>{"to": "</move>', '<tool_call>{"name": "look"}</tool_call>', "{", '{"name": "'),
        *('{"a":', "[", "[look(", "-", "1", " ", "\n", '"', '"""', "'", "\\", "```", "```python\n", "``` \n", "a"),
        *("Action:\nAction Input:\n", "Thought: \n", " \t", "[look(a=1)]", "<|tool_call_start|>[look(a=["),
        "<|tool_call_start|>[look()]<|tool_call_end|>",
    ]
    written = [text for text in examples(name)[3::3] if len(text) < 500]
    marks = {mark[0] for text in written for mark in MARK.finditer(text)}
    long = {unit: unit * (size // len(unit)) for unit in (*units, *marks, *written[:1])}
    beginnings = {written[0][: mark.end()] for mark in MARK.finditer(written[0])}
    return long | {f"{beginning} of {key}": beginning + text for key, text in long.items() for beginning in beginnings}


MARK = re.compile(r"<[^<>\n]+>|\[/?[A-Z_]+\]|^[A-Z][A-Za-z ]+:|`+\w*\n?|functools|\w+\(|[\[{(]|\"\w+\": ", re.MULTILINE)
"""A part of a format in a written call, after which hostile text may begin, and which it may repeat."""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_hostile_turns_take_no_longer_than_their_length(name: str) -> None:
    parser = load_parser(name)
    slow = {}
    for key, turn in hostile(name, 300_000).items():
        started = time.process_time()
        found = parser.parse(turn, SPECS)
        seconds = time.process_time() - started
        assert isinstance(found.content, str)
        if seconds > 1:
            slow[key] = seconds
    assert not slow


# --- custom formats --------------------------------------------------------------------------------------------------


PAGE = Path(__file__).parents[2].joinpath("docs/tool-call-formats.md").read_text(encoding="utf-8")


def test_a_parser_of_ones_own(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```python\n(# my_parser\.py\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_parser.py").write_text(snippet)
    parser = load_parser("my_parser.py:MyParser", tmp_path)
    found = parser.parse("I look.\n/search rain in May", SPECS)
    assert found == Reading("I look.", [("search", {"query": "rain in May"})])
    assert parser.parse(parser.write(found.calls, SPECS), SPECS).calls == found.calls
    error = parser.parse("/fly high", SPECS).error
    assert "fly" in error
    assert "/search" in (parser.instructions(SPECS[:1]) or "")


@pytest.mark.parametrize("name", PARSERS)
def test_examples_of_the_documentation(name: str) -> None:
    (example,) = re.findall(rf"### {name}\n.*?\n(`{{3,4}})\n(.*?)\n\1\n", PAGE, re.DOTALL)
    specs = [spec("search", ["query"], query=STRING, limit=INTEGER), spec("look"), SPECS[-1]]
    found = load_parser(name).parse(example[1], specs)
    assert found.error is None
    called, arguments = found.calls[0]
    if name == "code_block":
        assert (called, arguments) == ("python", {"code": "print(sum(range(10)))"})
    else:
        assert (called, arguments) == ("search", {"query": "rain"} if name == "tags" else {"query": "rain", "limit": 3})

"""Rough data files as they come in real life, each with its right outcome: the rows that a chain or SFT gets, or the
error that names the row and what to type."""

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentfactory.base.messages import ToolSpec

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A file `file` of `content` (rows are written in the format of its ending). `outcome` are the tasks of `keys` that
    it holds, or a pattern of the error; `notices` are patterns of all notices. `sft`: the rows are conversations, and
    the outcome has their tools as SFT shows them."""

    name: str
    file: str
    content: bytes | str | Rows
    outcome: Rows | str
    sft: bool = False
    columns: dict[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def write(self, folder: Path) -> Path:
        """Write the file into `folder`."""
        path = folder / self.file
        content = self.content
        if isinstance(content, list) and path.suffix.lower() == ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
            return path
        if isinstance(content, list):
            content = lines(content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


def lines(rows: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def compressed(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


def tool(name: str, properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """Return a tool in the OpenAI format."""
    parameters = {"type": "object", "properties": properties, "required": required or [], **more}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def call(name: str, arguments: Any, id: str = "c") -> dict[str, Any]:
    """Return a call in the OpenAI format."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def talk(*calls: dict[str, Any], content: Any = "") -> Rows:
    """Return a conversation with one turn of calls."""
    return [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
        *({"role": "tool", "content": "5", "tool_call_id": "c"} for _ in calls),
        {"role": "assistant", "content": "Done."},
    ]


def lined(name: str, content: bytes | str | Rows, outcome: Rows | str | None = None, **more: Any) -> Case:
    """Return a case of JSONL; without an outcome, `content` is it."""
    if outcome is None:
        assert isinstance(content, list)
        outcome = content
    return Case(name, "a.jsonl", content, outcome, **more)


def table(name: str, rows: bytes | Rows, outcome: Rows | str, **more: Any) -> Case:
    """Return a case of parquet."""
    return Case(name, "a.parquet", rows, outcome, **more)


def cells(name: str, text: str, outcome: Rows | str) -> Case:
    """Return a case of CSV."""
    return Case(name, "a.csv", text, outcome)


def chat(
    name: str,
    messages: Any,
    outcome: Rows | str | None = None,
    tools: Any = None,
    cleaned: Rows | None = None,
    notices: tuple[str, ...] = (),
) -> Case:
    """Return a case of one conversation for SFT: its messages become `outcome`, and its tools `cleaned`, by default
    both unchanged."""
    row = {"messages": messages} if tools is None else {"tools": tools, "messages": messages}
    known = tools if cleaned is None else cleaned
    becomes = outcome if isinstance(outcome, str) else [{"messages": outcome or messages, "tools": known or []}]
    return lined(name, [row], becomes, sft=True, notices=notices)


Q: dict[str, Any] = {"question": "What is 2 plus 3?", "answer": "5"}
USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "hello"}
HELLO = [USER, SAID]
WEATHER = tool("weather", {"city": {"type": "string"}}, ["city"])
ADD = tool("add", {"left": {"type": "integer"}, "right": {"type": "integer"}}, ["left", "right"])
BOTH = [
    {"tools": [WEATHER], "messages": talk(call("weather", {"city": "Oslo"}))},
    {"tools": [ADD], "messages": talk(call("add", {"left": 2, "right": 3}))},
]
NULLABLE = tool("find", {"text": {"type": "string"}, "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]}})
NESTED = tool(
    "book",
    {
        "guest": {"$ref": "#/$defs/Guest"},
        "extras": {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}},
    },
    **{"$defs": {"Guest": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}}},
)
RENAMED = r"fix: rename it with data\.columns\.{}"
PAGE = r"docs/data\.md, Rows of other projects"

FILES = [
    lined("byte order mark", b"\xef\xbb\xbf" + lines([Q]).encode(), [Q]),
    lined("blank lines", "\n" + lines([Q]) + "\n  \t\r\n" + lines([Q]) + "\n\n", [Q, Q]),
    lined("separators of lines in a text", '{"question": "a\u2028b\x85c"}\n', [{"question": "a\u2028b\x85c"}]),
    Case("gzip", "a.jsonl.gz", compressed(lines([Q, Q])), [Q, Q]),
    Case("gzip that is none", "a.jsonl.gz", lines([Q]), r"a\.jsonl\.gz is damaged: Not a gzipped file.*; fix: "),
    cells(
        "CSV",
        'question,answer\n"What is 2 plus 3?",5\n\n"a ""b"",\nc",07\n',
        [Q, {"question": 'a "b",\nc', "answer": "07"}],
    ),
    cells("CSV of semicolons", "question;answer\na;5\n", r"separates its columns by ';'; fix: save it with comm"),
    cells("CSV with a missing cell", "question,answer\na\n", r"a\.csv:2 does not have 2 cells"),
    cells("CSV with an open quote", 'question,answer\n"a,5\n', r"a\.csv:2 is not CSV: unexpected end"),
    cells(
        "CSV with messages as JSON",
        'messages,answer\n"[{""role"": ""user"", ""content"": ""hi""}]",5\n',
        [{"messages": [USER], "answer": "5"}],
    ),
    lined("another encoding", '{"question": "é"}'.encode("latin-1"), r"a\.jsonl:1 is not UTF-8"),
    lined("a list named as lines", json.dumps([Q], indent=1), r"a\.jsonl:1 is not JSON.*fix: rename it to \.json"),
    Case("lines named as a list", "a.json", lines([Q, Q]), r"a\.json:2 is not JSON.*; fix: rename it to \.jsonl"),
    Case("an object around the list", "a.json", json.dumps({"data": [Q]}), r"not a list of rows; fix: .*one in data"),
    lined("100,000 brackets", "[" * 100_000, r"a\.jsonl:1 cannot be read as JSON"),
    Case("tabs", "a.tsv", "question\tanswer\n", r"a\.tsv is neither .*; fix: convert it: python -c .*read_csv"),
    Case("a spreadsheet", "a.xlsx", b"PK", r"fix: convert it: python -c .*read_excel"),
    Case("zstd", "a.jsonl.zst", b"x", r"fix: decompress it: unzstd a\.jsonl\.zst"),
    lined("an empty file", "\n", r"a\.jsonl holds no rows"),
    table("damaged parquet", b"PAR1", r"a\.parquet cannot be read as parquet"),
]

QUESTIONS = [
    lined("messages as the question", [{"question": [USER], "answer": 1}], [{"messages": [USER], "answer": 1}]),
    lined(
        "messages as JSON text in the question",
        [{"question": json.dumps([USER])}],
        r"row 1 .*: question: .*which is messages; use data",
    ),
    lined("half of a surrogate pair", '{"question": "a\\ud83d"}\n', r"row 1 .*: question: it has half of a surr"),
    lined("a null question", [{"question": None, "messages": [USER]}], [{"messages": [USER]}]),
]

_WITH = [talk(call("find", {"text": "a", "limit": limit})) for limit in (1, None)]
_PADDED = {"guest": {"name": "a", "age": None}, "extras": [{"name": "b", "age": None}]}
_CYCLIC = tool("f", {"a": {"$ref": "#/properties/a"}})

NULLS = [
    table(
        "padding of parquet",
        BOTH,
        BOTH,
        sft=True,
        notices=(
            r"nulls dropped from messages, calls and tools, because the tools do not allow .* \(first in row 1\)",
        ),
    ),
    chat("a null that a schema allows", _WITH[1], tools=[NULLABLE]),
    table(
        "a null that a schema allows, parquet",
        [{"tools": json.dumps([NULLABLE]), "messages": messages} for messages in _WITH],
        [{"tools": [NULLABLE], "messages": messages} for messages in _WITH],
        sft=True,
        notices=("dropped from messages", "1 null kept in calls, because the tools allow them.*row 2"),
    ),
    chat(
        "nested padding",
        talk(call("book", _PADDED)),
        talk(call("book", {"guest": {"name": "a"}, "extras": [{"name": "b"}]})),
        tools=[NESTED],
        notices=("2 nulls dropped",),
    ),
    chat("no tools to judge by", talk(call("weather", {"city": None}))),
    chat(
        "null fields of messages",
        [USER | {"name": None, "tool_calls": None}, SAID | {"function_call": None, "weight": None, "refusal": None}],
        HELLO,
        notices=("^data: 5 nulls",),
    ),
    chat(
        "a cyclic schema",
        talk(call("f", {"a": None, "b": None})),
        talk(call("f", {"a": None})),
        tools=[_CYCLIC],
        notices=("1 null",),
    ),
]

_SUM = call("add", {"left": 2, "right": 3})
_NAMELESS = {"name": "add", "arguments": {"left": 1}}

CALLS = [
    lined(
        "a list as arguments",
        [Q | {"messages": HELLO}, {"messages": talk(call("add", "[1]"))}],
        r"row 2 .*: messages\.1\.tool_calls\.0\.function\.arguments: got \[1\], not an object",
    ),
    chat(
        "arguments as Python writes them",
        talk(call("add", "{'left': 1}")),
        r"row 1 .*: got \"\{'left': 1\}\", which is not JSON",
    ),
    chat("arguments as JSON text", talk(call("add", '{"left": 2, "right": 3}')), talk(_SUM), tools=[ADD]),
    chat(
        "no arguments",
        talk(call("a", None), call("b", ""), call("c", "{}")),
        talk(call("a", {}), call("b", {}), call("c", {})),
    ),
    chat(
        "NaN in arguments", talk(call("add", {"left": float("nan")})), r"row 1 .*arguments: got .*nan.*, which is not"
    ),
    lined(
        "a missing argument",
        [BOTH[0], {"tools": [ADD], "messages": talk(call("add", {"left": 2}))}],
        r"row 2 .*: messages\.1\.tool_calls\.0: the row's tool 'add' refuses these arguments: 'right' is a required",
    ),
    chat(
        "a tool that the row does not have",
        talk(call("sub", {})),
        r"row 1 .*: there is no tool 'sub' among the row's tools \(add\)",
        tools=[ADD],
    ),
    chat(
        "a wrong call that is not learned",
        [
            USER,
            {"role": "assistant", "content": "", "weight": 0, "tool_calls": [call("add", {"left": 2})]},
            {"role": "tool", "content": "right is missing"},
            *HELLO,
        ],
        tools=[ADD],
    ),
    chat("calls without the level function", talk(_NAMELESS), talk({"type": "function", "function": _NAMELESS})),
    chat(
        "calls of a user",
        [USER | {"tool_calls": [call("a", {})]}],
        r"row 1 .*: messages\.0\.tool_calls: a message of the role 'user' has calls",
    ),
    chat(
        "the call of OpenAI's first format",
        [USER, SAID | {"function_call": {"name": "a", "arguments": "{}"}}],
        r"row 1 .*: messages\.1\.function_call: .*, which is not read; write tool_calls",
    ),
    chat(
        "a call without a name",
        talk({"function": {"arguments": {}}}),
        r"row 1 .*: messages\.1\.tool_calls\.0: got .*, not \{function: \{name",
    ),
]

_FUNCTION = ADD["function"]
_STRICT = "tools have strict, which models do not get"

TOOLS = [
    chat("tools as JSON text", talk(_SUM), tools=json.dumps([ADD]), cleaned=[ADD]),
    chat("tools without the level function", talk(_SUM), tools=[_FUNCTION], cleaned=[ADD]),
    chat(
        "a tool with its name alone",
        talk(call("a", {})),
        tools=[{"type": "function", "function": {"name": "a"}}],
        cleaned=[ToolSpec("a", "", {"type": "object", "properties": {}}).to_openai()],
    ),
    chat(
        "a strict tool",
        talk(_SUM),
        tools=[ADD | {"function": _FUNCTION | {"strict": True}}],
        cleaned=[ADD],
        notices=(_STRICT,),
    ),
    chat(
        "a tool of MCP",
        talk(_SUM),
        tools=[{"name": "add", "description": "add", "inputSchema": _FUNCTION["parameters"]}],
        cleaned=[ADD],
    ),
    chat("tools that are names", HELLO, r"row 1: tools\.0: .*", tools=["add"]),
    chat("a name twice", HELLO, r"row 1: tools: two .* the name 'add'", tools=[ADD, ADD]),
]

MESSAGES = [
    chat("no text", [USER | {"content": 5}], r"row 1 .*: messages\.0\.content: got 5"),
    chat(
        "a role of another project",
        [USER | {"role": "human"}],
        r"row 1 .*: messages\.0\.role: got 'human', .*; rename it to user",
    ),
    chat("reasoning by another name", [USER, SAID | {"thinking": "a"}], [USER, SAID | {"reasoning_content": "a"}]),
    chat(
        "fields of no format",
        [USER | {"time": 3}],
        notices=("messages have the fields time, which only a chat template may read",),
    ),
    lined(
        "a conversation without messages",
        [{"question": "a", "answer": "b"}],
        r"row 1 has no 'messages' .*from_turns",
        sft=True,
    ),
]

_VERL: dict[str, Any] = {
    "data_source": "gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"index": 0, "split": "train", "need_tools_kwargs": True, "tools_kwargs": {"calc": {"a": 1}}},
    "agent_name": "tool_agent",
}
_SHAREGPT: dict[str, Any] = {
    "conversations": [
        {"from": "human", "value": "Go."},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"left": 2, "right": 3}}'},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "Done."},
    ],
    "system": "Be brief.",
    "tools": json.dumps([ADD["function"]]),
}
_SWIFT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "I add.", "loss": False},
        {"role": "tool_call", "content": '{"name": "add", "arguments": {"left": 2, "right": 3}}'},
        {"role": "tool_response", "content": "5"},
        {"role": "assistant", "content": "Done.", "loss": True},
    ],
    "tools": json.dumps([ADD]),
}
_VERL_TASK = {key: value for key, value in _VERL.items() if key != "prompt"} | {"messages": [USER]}

LAYOUTS = [
    table(
        "verl, RL",
        [_VERL],
        [_VERL_TASK | {"answer": "72"}],
        columns={"messages": "prompt", "answer": "reward_model.ground_truth"},
    ),
    table("verl, RL, no columns", [_VERL], r"row 1 .*neither .*" + RENAMED.format("messages=prompt")),
    table(
        "verl, RL, a nested field that is not there",
        [_VERL],
        r"data\.columns\.answer: row 1 .* has no field 'reward_model\.truth'",
        columns={"messages": "prompt", "answer": "reward_model.truth"},
    ),
    lined(
        "TRL, RL",
        [{"prompt": [USER], "solution": "5"}],
        [{"messages": [USER], "solution": "5"}],
        columns={"messages": "prompt"},
    ),
    lined("TRL, SFT", [{"messages": BOTH[1]["messages"], "tools": json.dumps([ADD])}], BOTH[1:], sft=True),
    lined(
        "TRL, SFT of a prompt and a completion",
        [{"prompt": HELLO[:1], "completion": HELLO[1:]}],
        rf"row 1 .*; fix: set data\.source to the function in {PAGE}, from_turns \(for reinforcement learning: "
        r"data\.columns\.messages=prompt\)",
    ),
    lined(
        "TRL, preferences",
        [{"chosen": HELLO, "rejected": HELLO}],
        r"no algorithm learns preferences; for sft: data\.columns\.messages=chosen",
    ),
    lined("ms-swift, SFT", [_SWIFT], r"row 1 .*: messages\.1\.loss: got False, which is not read; write weight"),
    lined(
        "ms-swift, SFT, its roles",
        [{"messages": _SWIFT["messages"][:1] + _SWIFT["messages"][2:]}],
        rf"row 1 .*role: got 'tool_call'.*the role is ms-swift's: .*{PAGE}, from_swift",
    ),
    lined("ShareGPT", [_SHAREGPT], rf"row 1 .*; fix: from and value are ShareGPT's: .*{PAGE}, from_sharegpt"),
]


def _nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 9\n"
_TEXT = {"type": "text", "text": "b"}
_PAGE = b"<!DOCTYPE html>\n<html></html>\n"

REPORTS = [
    lined("a pointer of Git LFS", _POINTER, r"a\.jsonl:1 is not JSON.*; fix: it is a pointer of Git LFS"),
    Case("a page instead of a file", "a.json", _PAGE, r"a\.json:1 is not JSON.*; fix: it is a page of a website"),
    lined("ends of lines of old Macs", lines([Q, Q]).replace("\n", "\r"), [Q, Q]),
    cells("an index of pandas", ",question\n0,a\n", r"names its columns \['', .*; fix: .* \(pandas: index=False\)"),
    cells(
        "an empty cell of messages",
        'question,messages\na,\n"","[{""role"": ""user"", ""content"": ""hi""}]"\n',
        [{"question": "a"}, {"question": "", "messages": [USER]}],
    ),
    chat(
        "calls without the field content",
        [USER, {"role": "assistant", "tool_calls": [call("add", {})]}],
        [USER, {"role": "assistant", "content": "", "tool_calls": [call("add", {})]}],
    ),
    *(
        chat(f"calls as the text {text!r}", [USER, SAID | {"tool_calls": text}], HELLO)
        for text in ("", " ", "[]", "null")
    ),
    *(chat(f"tools as the text {text!r}", HELLO, tools=text, cleaned=[]) for text in (" ", "[]", "null")),
    chat("a tool as JSON text in a list", talk(_SUM), tools=[json.dumps(ADD)], cleaned=[ADD]),
    chat("content of both kinds", [{"role": "system", "content": "a"}, USER | {"content": [_TEXT]}]),
    chat("parts of another API", [USER, SAID | {"content": [{"type": "tool_use"}]}], r"row 1 .*'tool_use'; use text"),
    *(
        chat(
            f"the field {name}",
            [USER, SAID | {name: value}],
            rf"row 1 .*: messages\.1\.{name}: got {value}, which is not read; write weight: 1 or 0",
        )
        for name, value in {"train": False, "training": True, "trainable": False, "mask": True, "loss_mask": 0}.items()
    ),
    lined("token ids", [{"input_ids": [1], "labels": [-100]}], r"row 1 .*; fix: .*rows of token ids are not read"),
    chat(
        "arguments under another name",
        talk({"name": "add", "parameters": {"left": 1}}),
        r"row 1 .*no arguments but 'parameters'",
    ),
    chat(
        "fields of calls",
        talk(call("add", {}) | {"index": 0, "parsed": {"a": 1}}),
        talk(call("add", {})),
        notices=("calls have parsed, which models do not get",),
    ),
]

DEEP = [
    chat(
        "content of 700 levels",
        [USER | {"content": [_nested(700)]}],
        r"row 1 .*: its messages or tools have too many levels",
    )
]
"""Cases that a fuzzer, which recurses, does not try."""

CASES = [*FILES, *QUESTIONS, *NULLS, *CALLS, *TOOLS, *MESSAGES, *LAYOUTS, *REPORTS, *DEEP]

_BRIEF = {"role": "system", "content": "Be brief."}
_GO, _RESULT, _DONE = (
    {"role": role, "content": text} for role, text in (("user", "Go."), ("tool", "5"), ("assistant", "Done."))
)
_ADDS = {"role": "assistant", "content": "", "tool_calls": [{key: _SUM[key] for key in ("type", "function")}]}

CONVERTED: dict[str, tuple[dict[str, Any], dict[str, str], Rows, Rows]] = {
    "from_sharegpt": (_SHAREGPT, {}, [_BRIEF, _GO, _ADDS, _RESULT, _DONE], [ADD]),
    "from_swift": (
        _SWIFT,
        {},
        [_GO, _ADDS | {"content": "I add.", "weight": 0.0}, _RESULT, _DONE | {"weight": 1.0}],
        [ADD],
    ),
    "from_turns, TRL": ({"prompt": HELLO[:1], "completion": HELLO[1:]}, {}, HELLO, []),
    "from_turns, ms-swift": (
        {"query": "hi", "response": "hello", "history": [["a", "b"]], "system": "Be brief."},
        {"question": "query", "answer": "response"},
        [_BRIEF, USER | {"content": "a"}, SAID | {"content": "b"}, *HELLO],
        [],
    ),
    "from_turns, Alpaca": (
        {"instruction": "Add.", "input": "2 and 3", "output": "5"},
        {"question": "instruction", "answer": "output"},
        [USER | {"content": "Add.\n2 and 3"}, SAID | {"content": "5"}],
        [],
    ),
}
"""Function of docs/data.md -> a row of another project, its options, and its messages and tools."""

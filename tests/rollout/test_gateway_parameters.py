"""Parameters of an agent's requests: each has the effect that docs/own-agents.md names."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from agentfactory.rollout.gateway import anthropic_messages as messages
from agentfactory.rollout.gateway import chat_completions, responses
from agentfactory.rollout.gateway.request_options import Refusal, TurnRequest
from tests.conftest import REPOSITORY

USER = [{"role": "user", "content": "go"}]
PLAIN: dict[Any, dict[str, Any]] = {
    chat_completions: {"messages": USER},
    responses: {"input": USER},
    messages: {"messages": USER, "max_tokens": 9},
}
SCHEMA = {"type": "json_schema"}
APPLIED: dict[Any, dict[str, tuple[Any, str, Any]]] = {
    chat_completions: {
        "max_tokens": (7, "max_tokens", 7),
        "max_completion_tokens": (7, "max_tokens", 7),
        "stop": ("END", "stop", ("END",)),
        "n": (3, "choices", 3),
        "stream": (True, "stream", True),
        "model": ("m", "model", "m"),
        "logprobs": (True, "options", {"logprobs": True, "usage": False}),
        "stream_options": ({"include_usage": True}, "options", {"logprobs": False, "usage": True}),
    },
    responses: {
        "max_output_tokens": (7, "max_tokens", 7),
        "stream": (True, "stream", True),
        "model": ("m", "model", "m"),
        "instructions": ("Notes.", "messages", [{"role": "system", "content": "Notes."}, *USER]),
    },
    messages: {
        "max_tokens": (7, "max_tokens", 7),
        "stop_sequences": (["END"], "stop", ("END",)),
        "stream": (True, "stream", True),
        "model": ("m", "model", "m"),
        "system": ("Notes.", "messages", [{"role": "system", "content": "Notes."}, *USER]),
        "thinking": ({"type": "enabled"}, "options", {"thinking": True}),
    },
}
"""Parameter -> a value, the field of TurnRequest that it sets, and the field's resulting value."""
ELSEWHERE = {"messages", "input", "tools", "previous_response_id", "include", "store"}
"""Applied, and tested with the agents that send them."""
SAMPLING = {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "seed": 1}
TOLD: dict[Any, dict[str, Any]] = {
    chat_completions: {
        **SAMPLING,
        "frequency_penalty": 1.0,
        "presence_penalty": 1.0,
        "logit_bias": {"1": 5},
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning_effort": "high",
        "verbosity": "low",
        "web_search_options": {},
        "tools": [{"type": "custom"}],
    },
    responses: {
        **SAMPLING,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "context_management": [{"type": "compaction"}],
        "tools": [{"type": "web_search"}],
    },
    messages: {
        **SAMPLING,
        "tool_choice": {"type": "any"},
        "output_config": {"effort": "low"},
        "context_management": {"edits": []},
        "mcp_servers": [{"name": "x"}],
        "tools": [{"type": "web_search_20250305"}],
    },
}
HARMLESS: dict[Any, dict[str, Any]] = {
    chat_completions: {
        "temperature": 1.0,
        "top_p": 1.0,
        "presence_penalty": 0,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "verbosity": "medium",
        "response_format": {"type": "text"},
        "modalities": ["text"],
    },
    responses: {"truncation": "disabled", "reasoning": {"summary": "auto"}, "text": {"format": {"type": "text"}}},
    messages: {"tool_choice": {"type": "auto"}, "mcp_servers": [], "output_config": {}},
}
"""Parameters that clients send by default, or that can be ignored without loss."""
REFUSED: dict[Any, dict[str, Any]] = {
    chat_completions: {
        "response_format": SCHEMA,
        "functions": [{"name": "f"}],
        "function_call": "auto",
        "audio": {"voice": "a"},
        "modalities": ["text", "audio"],
        "top_logprobs": 5,
    },
    responses: {
        "text": {"format": SCHEMA},
        "background": True,
        "conversation": "c",
        "prompt": {"id": "p"},
        "top_logprobs": 5,
    },
    messages: {
        "output_config": {"format": SCHEMA},
        "output_format": SCHEMA,
        "container": "c",
        "thread": {"type": "create"},
        "compaction": {"type": "x"},
    },
}
APIS = pytest.mark.parametrize("api", list(PLAIN), ids=lambda api: api.__name__.rpartition(".")[2])


def read(api: Any, **fields: Any) -> TurnRequest:
    return api.read({**PLAIN[api], **fields}, 1.0, {})


@APIS
def test_parameters_have_their_effect(api: Any) -> None:
    assert read(api).unmet == {}
    for name, (value, field, expected) in APPLIED[api].items():
        asked = read(api, **{name: value})
        assert (getattr(asked, field), asked.unmet) == (expected, {}), name
    for name, value in TOLD[api].items():
        (told,) = read(api, **{name: value}).unmet
        assert told.partition(".")[0] == name
    for name, value in HARMLESS[api].items():
        assert read(api, **{name: value}).unmet == {}, name
    for name, value in REFUSED[api].items():
        with pytest.raises(Refusal, match=rf"^{name}(\.format)?: ") as refused:
            read(api, **{name: value})
        assert refused.value.status == 400


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


@pytest.mark.parametrize(
    ("api", "asked", "problem"),
    [
        (chat_completions, {"n": 0}, "n: got 0; use a whole number from 1 to 64"),
        (chat_completions, {"messages": [{"role": "poet", "content": "x"}]}, "got the role 'poet'"),
        (chat_completions, {"messages": []}, "messages: give a list with at least one"),
        (chat_completions, {"tools": [{"type": "function", "function": {}}]}, "tools: {} has no name"),
        (
            chat_completions,
            user({"type": "image_url", "image_url": {"url": "http://x/y"}}),
            "http://x/y is not fetched",
        ),
        (chat_completions, user({"type": "input_audio"}), "parts of type 'input_audio'"),
        (chat_completions, {"stop": "\ud800"}, "stop: "),
        (chat_completions, {"stop": ["x" * i for i in range(1, 100)]}, "stop: got 99 texts"),
        (messages, user({"type": "document"}), "parts of type 'document'"),
        (responses, {"text": {"format": SCHEMA}}, "text.format: a grammar changes the distribution"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(api: Any, asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refusal, match=re.escape(problem)):
        api.read({**PLAIN[api], **asked}, 1.0, responses.Stored())


def test_the_page_says_the_same() -> None:
    page = (REPOSITORY / "docs" / "own-agents.md").read_text(encoding="utf-8")
    table = page.partition("## Request parameters")[2].partition("\nWhatever else")[0]
    said: dict[str, str] = {}
    for line in table.splitlines():
        if match := re.fullmatch(r"\| (.+?) \| (applied|not applied|refused)\b.*", line):
            said |= dict.fromkeys(re.findall(r"`([\w.]+)`", match[1]), match[2])
    assert len(said) > 30

    def named(table: Mapping[Any, Mapping[str, Any]]) -> set[str]:
        return {
            f"{name}.{next(iter(value))}" if name in ("reasoning", "text", "output_config") else name
            for parameters in table.values()
            for name, value in parameters.items()
        }

    assert {name for name, effect in said.items() if effect == "not applied"} == named(TOLD) - {"tools"}
    assert {name for name, effect in said.items() if effect == "refused"} == named(REFUSED)
    applied = {name for name, effect in said.items() if effect == "applied"}
    assert applied <= named(APPLIED) | ELSEWHERE

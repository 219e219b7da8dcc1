"""Tests of invalid `mcp_servers:` and `limits:`: each is refused with a fix."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from agentfactory.base.config import McpServerConfig


def test_the_usual_block_is_taken_as_it_is() -> None:
    everything = {"type": "stdio", "command": "npx", "args": ["-y", "some-server"], "env": {"TOKEN": "${TOKEN}"}}
    assert McpServerConfig.model_validate(everything).command == "npx"
    http = {"type": "http", "url": "http://127.0.0.1:1/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}}
    assert McpServerConfig.model_validate(http).url == "http://127.0.0.1:1/mcp"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "got none; fix: give exactly one of command, url, module, container"),
        ({"command": "x", "url": "http://a"}, "got ['command', 'url']"),
        ({"command": "x", "type": "http"}, "type: got 'http' with command"),
        ({"url": "http://a", "args": ["x"]}, "args: got ['x']: it applies to command and container, and this server"),
        ({"container": "image", "cwd": "/"}, "cwd: got '/': it applies to command"),
        ({"command": "x", "isolation": "session"}, "isolation: got session with command; fix: use shared or process"),
        ({"url": "http://a", "isolation": "process"}, "isolation: got process with url; fix: use shared or session"),
        ({"module": "a.py:B", "isolation": "process"}, "each chain has an instance of its own"),
        ({"command": "x", "comand": "y"}, "comand"),
        (
            {"command": "x", "workspace": "desk"},
            "workspace: got 'desk', but no chain has a folder: no `command` refers to ${chain}; fix: ",
        ),
        ({"url": "http://a", "workspace": "desk"}, "but no chain has a folder: no `command` refers"),
        ({"url": "http://a", "headers": {"X": "s3cret ${chain}"}}, "headers.X: got '${chain}': only args"),
        ({"command": "x", "args": ["${chain}"], "isolation": "shared"}, "got 'shared', but ${chain} needs a process"),
        ({"command": "x", "env": {"A": "${chain}/a"}, "pool": {"max_uses": 2}}, "pool.max_uses: got 2, but a process"),
        ({"container": "image", "args": ["${chain}"]}, "is a folder of this machine; fix: use"),
    ],
)
def test_servers_that_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        McpServerConfig.model_validate(fields)

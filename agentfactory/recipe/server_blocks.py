"""The blocks of MCP servers of other programs, read as `mcp_servers`: Claude Desktop and Code, Cursor, VS Code, Gemini
CLI, Cline, Windsurf, Zed, opencode and Continue."""

import re
from collections.abc import Iterator
from typing import Any

from agentfactory.base.config import WAYS
from agentfactory.base.errors import SettingError, short

_FIELD = "mcp_servers"
_BLOCKS = ("mcpServers", "servers", "context_servers", "mcp")
"""Names of such blocks. VS Code and opencode nest them in `mcp`."""
_RENAMED = {
    "httpUrl": "url",
    "serverUrl": "url",
    "includeTools": "allow",
    "enabledTools": "allow",
    "excludeTools": "deny",
    "disabledTools": "deny",
    "transport": "type",
    "transportType": "type",
}
_WITHOUT_EFFECT = {"alwaysAllow", "autoApprove", "trust", "description", "icon", "source"}
"""Keys about permissions, which training never asks for, and about display."""
_KEY = "send a key instead: headers: {Authorization: 'Bearer ${TOKEN}'}"
_INSTEAD = {
    "envFile": "write its variables in env, as NAME: ${NAME}, and export them",
    **dict.fromkeys(("auth", "oauth", "authProviderType", "headersHelper"), _KEY),
}
_TYPES = {"local": "stdio", "remote": "http", "streamablehttp": "http", "streamable_http": "http"}
_FILLED_IN = ("env", "headers")
_PLACEHOLDER = re.compile(
    r"\$\{(\w+:[^}-][^}]*|workspaceFolder|workspaceFolderBasename|workspaceRoot|userHome|pathSeparator|/)\}"
    r"|\$\{(?P<variable>[A-Z][A-Z0-9_]*|\w+(?P<default>:-[^}]*))\}"
)
_BARE = re.compile(r"(?<![\w$])\$([A-Z_][A-Z0-9_]*)")


def take_server_blocks(data: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's mapping with other programs' blocks as `mcp_servers`. Raises SettingError."""
    taken, servers = dict(data), data.get(_FIELD)
    if servers is not None:
        taken[_FIELD] = servers = _read(_FIELD, _unwrapped(servers))
    for name in _BLOCKS:
        block = _unwrapped(data.get(name))
        if not _is_block(block):
            continue
        del taken[name]
        for server, entry in _read(name, block).items():
            if isinstance(servers := taken.setdefault(_FIELD, {}), dict):
                if server in servers:
                    raise SettingError(f"{name}.{server}", f"{_FIELD} has a {server!r} too", "keep one of the two")
                servers[server] = entry
        inputs = taken.get("inputs")
        if isinstance(inputs, list) and all(isinstance(each, dict) and "id" in each for each in inputs):
            # questions of VS Code; an entry that refers to one is refused
            del taken["inputs"]
    return taken


def _unwrapped(block: Any) -> Any:
    """Return the servers of a whole file's contents, pasted as a block; other blocks unchanged."""
    while isinstance(block, dict) and block and {*block} <= {*_BLOCKS, "inputs"}:
        inner = next((block[name] for name in _BLOCKS if name in block), None)
        if not _is_block(_unwrapped(inner)):
            break
        block = inner
    if isinstance(block, list) and all(isinstance(each, dict) and "name" in each for each in block):
        return {str(each["name"]): {key: value for key, value in each.items() if key != "name"} for each in block}
    return block


def _is_block(block: Any) -> bool:
    ways = {*WAYS, *(old for old, new in _RENAMED.items() if new in WAYS)}
    entries = block.values() if isinstance(block, dict) else ()
    return bool(entries) and all(isinstance(entry, dict) and ways & {*entry} for entry in entries)


def _read(block: str, servers: Any) -> Any:
    if not isinstance(servers, dict):
        return servers  # validation reports it
    read = {}
    for name, entry in servers.items():
        if not isinstance(entry, dict):
            read[name] = entry
        elif entry.get("disabled") is not True and entry.get("enabled") is not False:
            read[name] = _entry(f"{block}.{name}", entry)
    return read


def _entry(field: str, given: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for key, value in given.items():
        if key in _INSTEAD:
            raise SettingError(f"{field}.{key}", "AgentFactory has no such field", _INSTEAD[key])
        if key == "timeout":
            seconds = value / 1000 if isinstance(value, (int, float)) and value >= 1000 else value
            fix = f"write timeout_seconds: {seconds} (Gemini CLI and Claude Code count milliseconds)"
            raise SettingError(f"{field}.{key}", f"got {short(value)}, whose unit differs between programs", fix)
        if key in _WITHOUT_EFFECT or (key in ("disabled", "enabled") and isinstance(value, bool)):
            continue
        new = _RENAMED.get(key, key)
        if new in entry:
            raise SettingError(f"{field}.{key}", f"given with {new}, its name here", "keep one of the two")
        entry[new] = value
    if given.get("type") == "local" and "environment" in entry:
        entry["env"] = entry.pop("environment")
    if isinstance(entry.get("command"), list) and entry["command"]:
        entry["command"], *arguments = entry["command"]
        entry["args"] = [*arguments, *entry.get("args", ())]
    if isinstance(kind := entry.get("type"), str):
        if kind.lower() == "sse":
            fix = (
                "name its address of streamable HTTP, which replaced SSE and often ends with /mcp, and write type: http"
            )
            raise SettingError(f"{field}.type", "got 'sse', which AgentFactory does not speak", fix)
        entry["type"] = _TYPES.get(kind.lower().replace("-", ""), kind)
    for name in _FILLED_IN:
        if isinstance(values := entry.get(name), dict):
            entry[name] = {
                key: re.sub(r"\$\{env:(\w+)\}", r"${\1}", value) if isinstance(value, str) else value
                for key, value in values.items()
            }
    for name, text in _texts(entry):
        if (problem := _unfilled(name, text)) is not None:
            raise SettingError(f"{field}.{name}", *problem)
    return entry


def _texts(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("command", "cwd", "url"):
        if isinstance(entry.get(name), str):
            yield name, entry[name]
    for number, text in enumerate(entry["args"] if isinstance(entry.get("args"), list) else ()):
        if isinstance(text, str):
            yield f"args.{number}", text
    for name in _FILLED_IN:
        for key, text in (entry[name] if isinstance(entry.get(name), dict) else {}).items():
            if isinstance(text, str):
                yield f"{name}.{key}", text


def _unfilled(name: str, text: str) -> tuple[str, str] | None:
    """Return problem and fix of a placeholder that would be passed on unchanged; the rest may be a secret."""
    filled_in = name.partition(".")[0] in _FILLED_IN
    for found in _PLACEHOLDER.finditer(text):
        # a text with spaces may be a shell's, which fills in its own variables
        is_theirs = not found["default"] if filled_in else re.search(r"\s", text)
        if not (found["variable"] and is_theirs):
            problem = f"got {found[0]}, which AgentFactory does not fill in{'' if filled_in else ' here'}"
            return problem, "write the value, or ${NAME} in env or headers, and export NAME"
    bare = _BARE.search(text) if name.startswith("headers.") else _BARE.fullmatch(text)
    if filled_in and bare is not None:
        return f"got ${bare[1]}, which AgentFactory does not fill in", f"write ${{{bare[1]}}}"
    return None

"""An MCP server in plain Python that sends what a plan says, since the SDK's own server would refuse most of it.

A plan has `tools`, the list as it is sent, `answers`: tool -> the text of its answer, and `methods`: method -> the text
of its answer (null: none). Texts have $ID for the request's id. Other tools answer with their arguments.

Run as a program with a plan's file, it serves stdio."""

import json
import sys
from typing import Any

ID = "$ID"


def message_of(**fields: Any) -> str:
    """Return the text of an answer with `result` or `error`."""
    return json.dumps({"jsonrpc": "2.0", "id": ID, **fields})


def replies(plan: dict[str, Any], line: str) -> list[str]:
    message = json.loads(line)
    number, method = message.get("id"), message.get("method")
    if number is None:
        return []
    if method in plan.get("methods", {}):
        text = plan["methods"][method]
        return [text.replace(f'"{ID}"', json.dumps(number))] if text is not None else []
    if method == "initialize":
        info = {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "r", "version": "1"},
        }
        result: dict[str, Any] = {"result": info}
    elif method == "tools/list":
        result = {"result": {"tools": plan["tools"]}}
    elif method == "ping":
        result = {"result": {}}
    elif method == "tools/call" and (text := plan.get("answers", {}).get(message["params"]["name"])) is not None:
        return [text.replace(f'"{ID}"', json.dumps(number))]
    elif method == "tools/call":
        text = json.dumps(message["params"].get("arguments"))
        result = {"result": {"content": [{"type": "text", "text": text}]}}
    else:
        result = {"error": {"code": -32601, "message": "Method not found"}}
    return [json.dumps({"jsonrpc": "2.0", "id": number, **result})]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        read = json.load(file)
    for given in sys.stdin:
        for reply in replies(read, given):
            sys.stdout.buffer.write(reply.encode("utf-8", "surrogateescape") + b"\n")
        sys.stdout.flush()

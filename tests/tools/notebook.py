"""A typical third-party MCP server: one word for the whole process, no chain keys, the older protocol, no SDK.

Started as a script; it needs only Python, so hundreds of its processes cost little."""

import json
import sys
import time
from typing import Any

STATE: dict[str, Any] = {"word": "nothing", "calls": 0}


def schema(**properties: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": [name for name, kind in properties.items() if kind == "string"],
    }


TOOLS = {
    "begin": schema(word="string"),
    "write": schema(word="string"),
    "read": schema(seconds="number"),
    "judge": schema(),
    "burn": schema(),
    "sleep": schema(path="string"),
}


def answer(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    STATE["calls"] += 1
    if name in ("begin", "write"):
        STATE["word"] = arguments["word"]
        for option in sys.argv[1:]:
            with open(option.removeprefix("--file="), "a") as file:
                file.write(arguments["word"])
    time.sleep(arguments.get("seconds", 0))
    if name == "burn":
        sys.exit(1)
    if name == "sleep":
        open(arguments["path"], "w").close()
        time.sleep(60)
    text = str(STATE["calls"] if name == "judge" else STATE["word"])
    return {"content": [{"type": "text", "text": text}]}


def respond(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            return {
                "result": {
                    "protocolVersion": params["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "notebook", "version": "1"},
                }
            }
        case "ping":
            return {"result": {}}
        case "tools/list":
            return {"result": {"tools": [{"name": name, "inputSchema": form} for name, form in TOOLS.items()]}}
        case "tools/call":
            return {"result": answer(params["name"], params.get("arguments", {}))}
    return {"error": {"code": -32601, "message": f"no method {method}"}}


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            reply = respond(message["method"], message.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}), flush=True)

"""A server in plain Python whose tool `text` returns BYTES bytes; writing them through the SDK would be too slow."""

import json
import os
import sys

ANSWERS = {
    "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x"}},
    "tools/list": {"tools": [{"name": "text", "inputSchema": {"type": "object"}}]},
}
ANSWERS["initialize"]["serverInfo"]["version"] = "1"

for line in sys.stdin:
    message = json.loads(line)
    frame = {"jsonrpc": "2.0", "id": message.get("id")}
    if message["method"] == "tools/call":
        text = "word " * (int(os.environ["BYTES"]) // 5)
        answer = {"result": {"content": [{"type": "text", "text": text}]}, **frame}
    elif message["method"] in ANSWERS:
        answer = {**frame, "result": ANSWERS[message["method"]]}
    elif "id" in message:
        answer = {**frame, "error": {"code": -32601, "message": "no such method"}}
    else:
        continue
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()

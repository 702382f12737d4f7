"""A minimal MCP server of the standard library with faults that no SDK allows."""

import json
import os
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else None
EMPTY = {"type": "object", "properties": {}}
TEXT = {"type": "string", "enum": ["a", "b"]}
SCHEMAS = {
    "put": {"type": "object", "properties": {"word": TEXT}, "required": ["word"]},
    "get": EMPTY,
    "write": {"type": "object", "properties": {"name": TEXT, "text": TEXT}, "required": ["name", "text"]},
    "files": EMPTY,
    "half": EMPTY,
    "wait": EMPTY,
    "cancelled": EMPTY,
    "grow": EMPTY,
    "ask": {"type": "object", "properties": {"method": {"type": "string"}}, "required": ["method"]},
    "large": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    "tree": {
        "type": "object",
        "properties": {"node": {"$ref": "#/$defs/node"}},
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    },
    "refuse": EMPTY,
    "garbled": EMPTY,
    "quit": EMPTY,
}
words: list[str] = []
cancelled: list[int] = []
grown: list[str] = []


def say(message: dict) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def hear() -> dict:
    line = sys.stdin.readline()
    if not line:
        raise SystemExit
    return json.loads(line)


def listed(cursor: str | None) -> dict:
    """Return two tools per page."""
    names, start = [*SCHEMAS, *grown], int(cursor or 0)
    page = [{"name": n, "description": n, "inputSchema": SCHEMAS.get(n, EMPTY)} for n in names[start : start + 2]]
    return {"tools": page} | ({"nextCursor": str(start + 2)} if start + 2 < len(names) else {})


def ask(method: str) -> str:
    """Return the client's answer to a request of the server."""
    say({"id": "mine", "method": method, "params": {} if method == "roots/list" else ASKED[method]})
    while (answer := hear()).get("id") != "mine":
        pass
    return json.dumps(answer.get("result") or answer["error"])


ASKED = {
    "sampling/createMessage": {"messages": [], "maxTokens": 1},
    "elicitation/create": {
        "message": "?",
        "requestedSchema": {"type": "object", "properties": {"size": {"type": "string"}}, "required": ["size"]},
    },
}


def called(name: str, given: dict) -> str:
    if name == "put":
        words.append(given["word"])
    if name in ("put", "get"):
        return " ".join(words)
    if name == "write":
        path = FOLDER / given["name"]
        path.write_text(given["text"])
        return f"{path} is written"
    if name == "files":
        return " ".join(sorted(str(path) for path in FOLDER.iterdir()))
    if name == "grow":
        grown.append(f"grown_{len(grown)}")
        say({"method": "notifications/tools/list_changed"})
        return grown[-1]
    if name == "quit":
        print("I cannot go on", file=sys.stderr)
        raise SystemExit(5)
    special = {"half": "a\ud800b\0", "cancelled": str(len(cancelled)), "large": "x" * given.get("count", 0)}
    return ask(given["method"]) if name == "ask" else special.get(name, name)


def main() -> None:
    while True:
        request = hear()
        method, params = request["method"], request.get("params") or {}
        if method == "notifications/cancelled":
            cancelled.append(params["requestId"])
        if "id" not in request:
            continue
        if method == "initialize":
            offered = {"tools": {"listChanged": True}}
            info = {"name": "tiny", "version": "1"}
            result = {
                "protocolVersion": os.environ.get("MCP_VERSION", "2025-06-18"),
                "capabilities": offered,
                "serverInfo": info,
            }
        elif method == "tools/list":
            result = listed(params.get("cursor"))
        elif method == "tools/call":
            if params["name"] == "wait":
                continue
            if params["name"] == "refuse":
                say({"id": request["id"], "error": {"code": -32602, "message": "not today"}})
                continue
            text = called(params["name"], params.get("arguments") or {})
            result = {"content": [{"type": "text", "text": text}] if params["name"] != "garbled" else 3}
        else:
            say({"id": request["id"], "error": {"code": -32601, "message": f"no method {method}"}})
            continue
        say({"id": request["id"], "result": result})


if __name__ == "__main__":
    main()

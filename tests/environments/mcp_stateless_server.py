"""An MCP server of version 2026-07-28, of the standard library, with faults that no SDK allows."""

import json
import sys

MODE = sys.argv[1] if len(sys.argv) > 1 else ""
EMPTY = {"type": "object", "properties": {}}
COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
LOOP = {"$ref": "#/$defs/a0", "$defs": {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}}
LOOP["$defs"]["a40"] = {"type": "object"}
OUTPUT = {"good": COUNT, "wrong": COUNT, "missing": COUNT, "invalid": {"type": "nonsense"}, "doubling": LOOP}
STRUCTURED = {"good": {"count": 1}, "wrong": {"count": "one"}, "invalid": {}, "doubling": {}}
TASKS = ("busy", "backwards", "patient", "odd", "empty", "curious", "flood")
STAMPS = {"createdAt": "x", "lastUpdatedAt": "x", "ttlMs": None}
INTERVALS = {"busy": 0, "backwards": -1e9, "patient": 1e300}
calls: list[dict] = []
polls = listens = 0


def listed(cursor: str | None) -> dict:
    if MODE == "endless":
        return {"tools": [], "nextCursor": "again"}
    if MODE == "many":
        return {"tools": [{"name": f"t{number}", "inputSchema": EMPTY} for number in range(20_000)]}
    if MODE == "million":
        return {"tools": [{"name": "t", "inputSchema": EMPTY}] * 1_000_000}
    names = [*STRUCTURED, "missing", *TASKS, "seen", "name", *["late"] * (listens > 1)]
    output = {name: {"outputSchema": OUTPUT[name]} for name in OUTPUT}
    return {"tools": [{"name": name, "inputSchema": EMPTY, **output.get(name, {})} for name in names]}


def called(name: str) -> dict:
    if name in TASKS:
        return {"resultType": "task", "taskId": name, "status": "working", **STAMPS, "pollIntervalMs": 0}
    if name in STRUCTURED:
        return {"resultType": "complete", "content": [], "structuredContent": STRUCTURED[name]}
    if name == "name":
        client = calls[-1]["params"]["_meta"]["io.modelcontextprotocol/clientInfo"]["name"]
        return {"resultType": "complete", "content": [{"type": "text", "text": client}]}
    text = json.dumps([call["method"] for call in calls if call["method"].startswith("tasks/cancel")])
    return {"resultType": "complete", "content": [{"type": "text", "text": text}]}


def polled(name: str) -> dict:
    global polls
    polls += 1
    task = {"resultType": "complete", "taskId": name, "status": "working", **STAMPS}
    if name in INTERVALS:
        task["pollIntervalMs"] = INTERVALS[name]
    if name == "odd":
        task["status"] = "thinking"
    if name == "empty":
        task["status"] = "completed"
    if name == "curious":
        params = {"message": f"{polls}?", "requestedSchema": {"type": "object", "properties": {}}}
        request = {"method": "elicitation/create", "params": params}
        task |= {"status": "input_required", "inputRequests": {str(polls): request}, "pollIntervalMs": 0}
    while name == "flood":
        sys.stdout.write("x" * 65536)
    return task


def listened(listen_id: object) -> dict | None:
    """Close the first subscription; the list of tools changes before the second one."""
    global listens
    listens += 1
    meta = {"io.modelcontextprotocol/subscriptionId": listen_id}
    params = {"notifications": {"toolsListChanged": True}, "_meta": meta}
    acknowledged = {"jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged", "params": params}
    print(json.dumps(acknowledged), flush=True)
    return {"resultType": "complete", "_meta": meta} if listens == 1 else None


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        calls.append(request)
        if "id" not in request:
            continue
        method, params = request["method"], request.get("params") or {}
        if method == "server/discover":
            offered = {"tools": {"listChanged": MODE == "changes"}, "extensions": {"io.modelcontextprotocol/tasks": {}}}
            result = {"supportedVersions": ["2026-07-28"], "capabilities": offered}
            result |= {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
        elif method == "tools/list":
            result = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private", **listed(params.get("cursor"))}
        elif method == "tools/call":
            result = called(params["name"])
        elif method == "subscriptions/listen":
            result = listened(request["id"])
            if result is None:
                continue
        elif method == "tasks/get":
            result = polled(params["taskId"])
        else:
            result = {"resultType": "complete"}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()

"""A chat completions server that stands in for a model, so that the example runs without one.

python stand_in_model.py [PORT]
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def complete(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Call the tool with the numbers of the question, then answer with its result."""
    last = messages[-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": f"It is {last['content']}."}
    x, y = re.findall(r"\d+", last["content"])
    function = {"name": "multiply", "arguments": json.dumps({"x": int(x), "y": int(y)})}
    call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class StandIn(BaseHTTPRequestHandler):
    """Answers POST /v1/chat/completions."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = complete(request["messages"])
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 10 * len(request["messages"]), "completion_tokens": 10}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        body = json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8771), StandIn)
    print(f"A stand-in for a model at http://127.0.0.1:{server.server_port}/v1; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()

"""A small environment server that counts to a target, with faults set by the configuration.

    python counter_server.py --port 8000 [--chatty] [--stubborn] [--never-healthy] [--refuse-start] [--ends]
        [--starts FILE]

`--starts` appends a line to a file each time the program starts.

The configuration of a start (`{"config": {...}}`): `target`, and `fault`, which the step `add` then shows: die, hang,
html, status, not_json, nested, list, no_observation, bad_reward, error_field, large, or no_key (from the second step).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

ADD = {
    "type": "object",
    "properties": {"amount": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["amount"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add to the counter.", "parameters": ADD}},
    {"name": "clear", "description": "Set the counter to zero.", "parameters": {"type": "object", "properties": {}}},
]


class Episode:
    def __init__(self, seed: int, config: dict) -> None:
        self.value, self.target = seed % 3, config.get("target", 10)
        self.fault, self.states = config.get("fault"), config.get("states", "key")
        self.steps = 0

    def shown(self) -> dict:
        answer = {"observation": {"value": self.value, "target": self.target}}
        if self.states == "key" and not (self.fault == "no_key" and self.steps > 1):
            answer["state_key"] = f"{self.value}/{self.target}"
        if self.states != "none":
            answer["state"] = {"value": self.value, "target": self.target}
        return answer

    def act(self, action: object) -> dict:
        call = action if isinstance(action, dict) else {"name": "add", "arguments": {"amount": action}}
        name, arguments = call["name"], call["arguments"]
        if name == "add":
            amount = arguments.get("amount")
            if arguments.keys() != {"amount"} or type(amount) is not int or not 1 <= amount <= 3:
                raise ValueError("amount must be 1, 2 or 3")
            self.value += amount
        elif arguments:
            raise ValueError("clear takes no arguments")
        else:
            self.value = 0
        self.steps += 1
        won = self.value == self.target
        return {**self.shown(), "reward": float(won), "is_done": self.value >= self.target, "info": {"success": won}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    episodes: ClassVar[dict[str, Episode]] = {}
    numbers = itertools.count()

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(503 if "--never-healthy" in sys.argv else 200, b"{}")
        elif self.path == "/tools":
            self.answer(200, json.dumps({"tools": TOOLS}).encode())
        elif self.path == "/seen":
            seen = {"open": len(self.episodes), "header": self.headers.get("X-Key"), "pid": os.getpid()}
            self.answer(200, json.dumps({**seen, "variables": sorted(os.environ), "folder": str(Path.cwd())}).encode())
        else:
            self.answer(404, b"<html>Not Found</html>")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/start_episode":
            if "--refuse-start" in sys.argv:
                self.answer(400, b'{"error": "no more episodes"}')
                return
            episode_id = f"e{next(self.numbers)}"
            episode = self.episodes[episode_id] = Episode(body["seed"], body.get("config") or {})
            self.answer(200, json.dumps({"episode_id": episode_id, **episode.shown()}).encode())
        elif self.path == "/end_episode":
            known = self.episodes.pop(body["episode_id"], None)
            self.answer(200 if known else 404, b'{"message": "ended"}')
        else:
            self.step(body)

    def step(self, body: dict) -> None:
        episode = self.episodes.get(body["episode_id"])
        if episode is None:
            self.answer(404, b"<html>no such episode</html>")
            return
        try:
            outcome = episode.act(body["action"])
        except ValueError as error:
            self.answer(400, json.dumps({"error": str(error)}).encode())
            return
        fault = episode.fault
        if fault == "die":
            print("something broke", flush=True)
            os._exit(3)
        if fault == "hang":
            time.sleep(100)
        wrong = {
            "html": b"<html>hello</html>",
            "status": b"Traceback: oh",
            "not_json": b'{"observation": NaN}',
            "list": b"[1]",
            "no_observation": b'{"reward": 1}',
            "bad_reward": b'{"observation": 1, "reward": "high"}',
            "nested": b"[" * 100_000,
        }
        if fault == "large":
            outcome["observation"] = "x" * 50_000_000
        if fault == "error_field":
            outcome = {"error": "not today"}
        self.answer(500 if fault == "status" else 200, wrong.get(fault) or json.dumps(outcome).encode())

    def answer(self, status: int, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    if "--chatty" in sys.argv:
        for number in range(4_000):
            print(f"line {number} " + "." * 50)
        print("ready to serve", flush=True)
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"], start_new_session=True)
    if "--starts" in sys.argv:
        with Path(sys.argv[sys.argv.index("--starts") + 1]).open("a") as file:
            file.write("started\n")
    if "--ends" in sys.argv:
        sys.exit("no database")
    Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main()

"""A chat completions server that stands in for two models, one that answers and one that judges.

    python stand_in.py [PORT]

The judge grades by the words that an answer shares with the reference, and sometimes omits the grade.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KNOWN = {
    "tides": "The Moon pulls the near side more than Earth's centre, the far side less, so water bulges twice.",
    "sky": "Air scatters the short wavelengths of sunlight more than the long ones, and blue is short.",
    "bread": "Yeast ferments the sugar and gives off carbon dioxide, which the dough holds.",
    "leap": "A year is about 365.2422 days, so most fourth years have a day more, to keep with the seasons.",
}
ASKED: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def complete(messages: list[dict[str, Any]]) -> str:
    """Return a grade for a judge's prompt, otherwise one of four answers in turn."""
    last = messages[-1]["content"]
    if not messages[0]["content"].startswith("You judge"):
        whole = next((text for word, text in KNOWN.items() if word in last), "")
        turn = next(ASKED[last]) % 4
        return (whole, whole[: len(whole) // 2], "Nobody knows.", whole.upper())[turn]
    reference, answer = (tagged_words(last, tag) for tag in ("reference", "answer"))
    grade = round(10 * len(reference & answer) / max(len(reference), 1))
    judgment = f"It has {len(reference & answer)} of {len(reference)} words."
    return judgment if zlib.crc32(last.encode()) % 5 == 0 else f"{judgment} Grade: {grade}"


def tagged_words(text: str, tag: str) -> set[str]:
    """Return the words of more than three letters between two tags."""
    match = re.search(rf"<{tag}>(.*)</{tag}>", text, re.DOTALL)
    return {word for word in re.findall(r"\w+", match[1].lower()) if len(word) > 3} if match else set()


class StandIn(BaseHTTPRequestHandler):
    """Answers POST /v1/chat/completions."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each body waits 40 ms for the acknowledgment of its headers

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = complete(request["messages"])
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 50, "completion_tokens": 20, "total_tokens": 70}
        completion = {"id": "c", "object": "chat.completion", "created": 0, "model": request["model"]}
        body = json.dumps({**completion, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8772), StandIn)
    print(f"A stand-in for two models at http://127.0.0.1:{server.server_port}/v1; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()

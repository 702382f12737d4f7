"""The worker's side of `engine_process`: one JSON request a line from standard input, one JSON answer a line.

A request is an object whose `op` names the operation. An answer is `{"ok": ...}`, or `{"error": message}` if the
request is wrong, after which the worker goes on. Any other exception ends the process, with its traceback on standard
error, which also gets everything that the engine's libraries print.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from reward_kit.errors import ConfigError, RewardKitError

Operations = Mapping[str, Callable[[Mapping[str, Any]], Any]]
"""From the request's `op` to a function of the request, whose value must be JSON-safe."""


def serve(start: Callable[[], Operations], requests: TextIO, answers: TextIO) -> None:
    """Start the engine, report that it is ready, and answer until the requests end."""

    def answer(value: Mapping[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        operations = start()
    except ConfigError as error:
        answer({"error": str(error)})
        return
    answer({"ok": "ready"})
    for line in requests:
        request = json.loads(line)
        try:
            answer({"ok": operations[request["op"]](request)})
        except RewardKitError as error:
            answer({"error": str(error)})


def run(start: Callable[[], Operations]) -> None:
    """Serve on this process's standard streams; anything that prints goes to standard error instead of the pipe.

    Args:
        start: makes the engine; a `ConfigError` that it raises is the client's.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(start, sys.stdin, answers)

"""The worker's side of `engine_process`: one JSON request a line from standard input, one JSON answer a line.

A request is an object whose `op` names the operation. An answer is `{"ok": ...}`, or `{"error": message}` where the
request is wrong, after which the worker goes on. Any other exception ends the process, with its traceback on standard
error, where everything goes that the engine's libraries print.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from reward_kit.errors import ConfigError, RewardKitError

Operations = Mapping[str, Callable[[Mapping[str, Any]], Any]]
"""What a worker can be asked: from the request's `op` to a function of the request, whose value must be JSON-safe."""


def serve(start: Callable[[], Operations], requests: TextIO, answers: TextIO) -> None:
    """Start the engine, say that it is ready, and answer until the requests end."""
    try:
        operations = start()
    except ConfigError as error:
        _say({"error": str(error)}, answers)
        return
    _say({"ok": "ready"}, answers)
    for line in requests:
        request = json.loads(line)
        try:
            answer = {"ok": operations[request["op"]](request)}
        except RewardKitError as error:
            answer = {"error": str(error)}
        _say(answer, answers)


def run(start: Callable[[], Operations]) -> None:
    """Serve on this process's standard streams. The pipe is kept to ourselves, so that nothing which prints breaks it.

    Args:
        start: makes the engine; a `ConfigError` that it raises is the client's.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(start, sys.stdin, answers)


def _say(answer: Mapping[str, Any], answers: TextIO) -> None:
    print(json.dumps(answer), file=answers, flush=True)

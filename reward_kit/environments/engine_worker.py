"""The worker's side of `engine_process`.

It reads JSON requests from standard input and writes JSON responses to standard output. Each request and each response
is one line. A request's `op` names the operation. A response is `{"ok": ...}`, or `{"error": message}` if the request
is invalid. Any other exception ends the process, and the traceback is written to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from reward_kit.errors import ConfigError, RewardKitError

Operations = Mapping[str, Callable[[Mapping[str, Any]], Any]]
"""Maps the `op` of a request to a function that takes the request and returns a JSON-safe value."""


def run(start: Callable[[], Operations]) -> None:
    """Start the engine, report that it is ready, and respond to requests until standard input ends.

    If `start` raises a `ConfigError`, the client raises the same error. Printed text goes to standard error instead of
    the pipe.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def answer(**value: Any) -> None:
            print(json.dumps(value), file=answers, flush=True)

        try:
            operations = start()
        except ConfigError as error:
            answer(error=str(error))
            return
        answer(ok="ready")
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer(ok=operations[request["op"]](request))
            except RewardKitError as error:
                answer(error=str(error))

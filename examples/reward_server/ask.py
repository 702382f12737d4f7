"""A client of a reward server that uses only the standard library.

    python ask.py http://127.0.0.1:8700

The environment variable REWARD_KIT_REWARD_API_KEY has the key.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

ATTEMPTS = 5


def ask(url: str, body: dict[str, Any]) -> Any:
    """Return the response to a request; retry after the `Retry-After` of a busy server."""
    key = os.environ["REWARD_KIT_REWARD_API_KEY"]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    for attempt in range(ATTEMPTS):
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503) or attempt == ATTEMPTS - 1:
                raise SystemExit(f"{url}: {error.code}: {error.read().decode()}") from error
            time.sleep(float(error.headers["Retry-After"]))
    raise AssertionError("the last attempt returns or exits")


def rollout(answer: str) -> dict[str, Any]:
    """Return a single-turn conversation."""
    question = {"role": "user", "content": "How much is 6 * 7?"}
    return {"messages": [question, {"role": "assistant", "content": answer}], "ground_truth": "42"}


def main() -> None:
    """Score a rollout and a group."""
    rewards = f"{sys.argv[1]}/v1/rewards"
    scored = ask(f"{rewards}/last_number/score", rollout("That makes 42."))
    print(scored["score"], scored["result"]["reason"])
    group = [rollout(answer) for answer in ("42", "It is 42", "43", "I do not know")]
    for item in ask(f"{rewards}/brevity/score_batch", {"rollouts": group})["scores"]:
        print(item["rollout_id"], item["score"])
    broken = ask(f"{rewards}/last_number/score", {**rollout("42"), "ground_truth": "forty-two"})
    print(broken["score"], broken["error"]["class"])


if __name__ == "__main__":
    main()

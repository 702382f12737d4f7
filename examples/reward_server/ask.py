"""Asks a reward server for scores with nothing but the standard library, as a trainer of any kind could.

    python ask.py http://127.0.0.1:8700

The key is in REWARD_KIT_REWARD_API_KEY.
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
    """The answer to one request; where the server is busy, it is asked again when it says so."""
    key = os.environ["REWARD_KIT_REWARD_API_KEY"]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    for attempt in range(ATTEMPTS):
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503) or attempt == ATTEMPTS - 1:
                raise SystemExit(f"{url}: {error.code}: {error.read().decode()}") from error
            time.sleep(float(error.headers["Retry-After"]))
    raise AssertionError("the last attempt returns or leaves")


def rollout(answer: str) -> dict[str, Any]:
    """A conversation of one turn."""
    question = {"role": "user", "content": "How much is 6 * 7?"}
    return {"messages": [question, {"role": "assistant", "content": answer}], "ground_truth": "42"}


def main() -> None:
    """Score one rollout, and a group."""
    rewards = f"{sys.argv[1]}/v1/rewards"
    one = ask(f"{rewards}/last_number/score", rollout("That makes 42."))
    print(one["score"], one["result"]["reason"])
    group = [rollout(answer) for answer in ("42", "It is 42", "43", "I do not know")]
    for told in ask(f"{rewards}/brevity/score_batch", {"rollouts": group})["scores"]:
        print(told["rollout_id"], told["score"])
    broken = ask(f"{rewards}/last_number/score", {**rollout("42"), "ground_truth": "forty-two"})
    print(broken["score"], broken["error"]["class"])


if __name__ == "__main__":
    main()

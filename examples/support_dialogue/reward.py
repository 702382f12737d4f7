"""Success by the final orders and the facts that the agent had to mention."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from reward_kit import EvaluateResult, Message, MetricResult, reward_function

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "shop.json").read_text(encoding="utf-8"))


@reward_function
def resolved(messages: list[Message], ground_truth: dict[str, Any], state: dict[str, Any]) -> EvaluateResult:
    """Return 1 if the final state is as expected and all facts were mentioned, else 0, as in τ-bench."""
    expected = changed(DATA, ground_truth["changes"])
    wrong = [
        f"{kind}.{id_}" for kind, rows in expected.items() for id_, row in rows.items() if state[kind].get(id_) != row
    ]
    replies = " ".join(message.text for message in messages if message.role == "assistant" and not message.tool_calls)
    unsaid = [fact for fact in ground_truth["facts"] if fact.lower() not in replies.lower()]
    metrics = {
        "state": MetricResult(score=float(not wrong), reason=f"wrong: {', '.join(wrong)}" if wrong else "as expected"),
        "facts": MetricResult(score=float(not unsaid), reason=f"not said: {unsaid}" if unsaid else "all said"),
    }
    return EvaluateResult(
        score=float(not wrong and not unsaid), reason="; ".join(m.reason for m in metrics.values()), metrics=metrics
    )


def changed(data: dict[str, Any], changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the data after these changes: new fields by "orders.ID" or "customers.ID"."""
    after = copy.deepcopy(data)
    for path, fields in changes.items():
        kind, _, id_ = path.partition(".")
        after[kind][id_] |= fields
    return after

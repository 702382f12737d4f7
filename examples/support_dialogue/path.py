"""A check of the order of the tool calls: the customer is identified before anything else."""

from __future__ import annotations

from reward_kit import with_options
from reward_kit.rewards import tool_path

identifies_first = with_options(
    tool_path,
    assertions=[
        {"before": ["find_customer_*", "*_order"]},
        {"before": ["find_customer_*", "change_address"]},
        {"tool_used": {"name": "*", "max": 10}},
    ],
)

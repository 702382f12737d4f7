"""Test that tables in the guides match enums of the code."""

from __future__ import annotations

import re
from pathlib import Path

from reward_kit.agent.models import StopReason
from reward_kit.checks.trainer_formulas import CAUSES

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def test_task_guide_lists_every_stop_reason() -> None:
    section = (
        (GUIDES / "tasks.md")
        .read_text(encoding="utf-8")
        .split("## Limits, timeouts and how an episode ends")[1]
        .split("\n## ")[0]
    )
    listed = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, *_, terminal = [cell.strip() for cell in line.strip("|").split("|")]
            listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), terminal == "yes")
    assert listed == {reason.value: reason.is_terminal for reason in StopReason}


def test_trainer_guide_lists_every_finding_with_its_level() -> None:
    page = (GUIDES / "check_trainers.md").read_text(encoding="utf-8").split("## verl and TRL")[0]
    listed = {}
    for line in page.splitlines():
        if level := re.match(r"\| (info|warning|error):", line):
            listed |= dict.fromkeys(re.findall(r"`([\w-]+)`", line), level[1])
    assert listed == {kind: level for kind, (level, _) in CAUSES.items()}

"""Check a reward in one call, for the tests in this folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from reward_kit.checks.reward import Plan, check_reward, load
from reward_kit.checks.reward_bench import Given, RewardReport
from reward_kit.reward_agent.loading import SandboxChoice

HEAD = """from __future__ import annotations
import math, os, random, re, time
from typing import Any
from reward_kit import EvaluateResult, Message, StepOutput, reward_function

def last(messages): return messages[-1].text if messages else ""

"""


def checked(
    reference: str,
    given: Given | None = None,
    level: str | None = None,
    against: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> RewardReport:
    """Return the report on a reward."""
    choice = SandboxChoice(level, reward_time_s=10.0)  # type: ignore[arg-type]
    plan = Plan(reference, choice, given=given or Given(), options=options or {}, against=against)
    loaded, other = load(plan)
    return anyio.run(check_reward, plan, loaded, other)


def written(folder: Path, body: str, name: str = "own.py") -> str:
    """Write a reward called `reward` with this body after the usual imports; return its reference."""
    (folder / name).write_text(HEAD + body, encoding="utf-8")
    return f"{folder / name}:reward"


def codes(report: RewardReport, *severities: str) -> set[str]:
    """Return the kinds of the findings, of some levels or of all."""
    return {finding.kind for finding in report.findings if not severities or finding.level in severities}

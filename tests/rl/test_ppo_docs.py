"""The page on the learner runs, and names every option and every limit with its default."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.off_policy import OffPolicyLimits

PAGE = (Path(__file__).parents[2] / "docs" / "ppo.md").read_text(encoding="utf-8")


def rows_of(title: str) -> list[str]:
    """The lines of the table below a title."""
    return [line for line in PAGE.split(title)[1].split("\n#")[0].splitlines() if line.startswith("|")]


def test_the_page_runs() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    assert names["found"]["alarm/lag_max"] == 93


def test_every_option_and_limit_is_on_the_page() -> None:
    options = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in rows_of("## Options"))))
    assert {one.name for one in fields(PPOConfig)} == options
    limits = {line.split("|")[1].strip(" `"): line.split("|")[2].strip() for line in rows_of("### Alarms")[2:]}
    expected = OffPolicyLimits()
    assert limits.keys() == {one.name for one in fields(OffPolicyLimits)}
    for name, told in limits.items():
        assert getattr(expected, name) == (None if told == "none" else float(told))


def test_every_diagnostic_of_an_update_is_on_a_page() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], names)
    losses = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
    told = PAGE.replace("`…_low`", "`clip_fraction_low`").replace("`…_high`", "`clip_fraction_high`") + losses
    for name in names["found"]:
        assert f"`{name}`" in told or name.startswith("alarm/"), name

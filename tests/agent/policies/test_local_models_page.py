"""Test that the page on local models matches the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from reward_kit.agent.policies.hf import chat_layout
from reward_kit.agent.policies.hf.action_formats import FORMATS
from reward_kit.agent.policies.hf.chat_layout import NO_TOOLS
from reward_kit.agent.policies.hf_policy import HFAgentPolicy

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "local_models.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table with these headings."""
    table = PAGE.split(f"| {heading} |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[2:]]


def test_page_lists_every_policy_option_with_its_default() -> None:
    parameters = inspect.signature(HFAgentPolicy).parameters
    listed = {}
    for keys, default, _ in rows("Key | Default | Meaning"):
        named = re.findall(r"`(\w+)`", keys)
        listed |= dict(zip(named, [default] * len(named) if len(named) == 1 else default.split(", "), strict=True))
    assert list(listed) == list(parameters)
    for key, default in listed.items():
        actual = parameters[key].default
        if actual is not None and actual is not inspect.Parameter.empty:
            assert default.strip("`") == str(actual).replace("True", "true").replace("False", "false"), key


def test_page_lists_every_format_and_segment_reason() -> None:
    assert {name.strip("`") for name, _ in rows("`action_format` | The model writes")} == {*FORMATS, "template"}
    reasons = {
        value
        for key, value in vars(chat_layout).items()
        if re.fullmatch("[A-Z]+_[A-Z_]+", key) and isinstance(value, str)
    }
    assert {name.strip("`") for name, _ in rows("`segment_reason` | Cause")} == reasons - {NO_TOOLS}

"""Test parsing and application of `-T key=value`."""

from __future__ import annotations

import pytest

from reward_kit.errors import ConfigError
from reward_kit.runs.task_file import apply_overrides, parse_override


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("limits.wall_time_s=2.5", ("limits.wall_time_s", 2.5)),
        ("phrases=[a, b]", ("phrases", ["a", "b"])),
        ("text=a=b", ("text", "a=b")),
        ("empty=", ("empty", None)),
    ],
)
def test_the_value_is_yaml(text: str, parsed: tuple[str, object]) -> None:
    assert parse_override(text) == parsed


@pytest.mark.parametrize("text", ["novalue", "=3", "a=["])
def test_invalid_value_is_named_with_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^-c "):
        parse_override(text, "-c")


def test_unquoted_text_is_shown_with_quotes() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_override("command={python} server.py", "-c")
    assert str(raised.value).endswith("""; to pass a string, quote it: -c 'command="{python} server.py"'""")
    assert parse_override('command="{python} server.py"') == ("command", "{python} server.py")


def test_inner_keys_are_laid_over_and_the_original_stays() -> None:
    data = {"limits": {"cost": 1}, "resources": [{"type": "a"}, {"type": "b"}]}
    changed = apply_overrides(data, {"limits.steps": 2, "resources.1.config.rows": 3, "user.type": "human"})
    assert changed == {
        "limits": {"cost": 1, "steps": 2},
        "resources": [{"type": "a"}, {"type": "b", "config": {"rows": 3}}],
        "user": {"type": "human"},
    }
    assert data == {"limits": {"cost": 1}, "resources": [{"type": "a"}, {"type": "b"}]}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("name.inner", "'name' is not a mapping"),
        ("rows.2", "'2' is not an index into a list of 2"),
        ("rows.x", "'x' is not a"),
    ],
)
def test_override_of_a_nonexistent_path_is_reported(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"-T {key}=…: {said}"):
        apply_overrides({"name": "t", "rows": [1, 2]}, {key: 1})

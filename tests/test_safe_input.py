"""Limits on input are documented and enforced."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from reward_kit import safe_input
from reward_kit.safe_input import TooLargeError, check_values, is_nested_too_deeply

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "runs.md"
CONSTANTS = {name: value for name, value in vars(safe_input).items() if name.isupper() and name != "MIB"}


@pytest.mark.parametrize("name", [name for name in CONSTANTS if name != "TYPE_CHECKING"])
def test_every_limit_is_documented_and_has_a_reason(name: str) -> None:
    value = CONSTANTS[name]
    size = safe_input.format_size(int(value)) if value >= 1024 and value % 1024 == 0 else f"{value:,g}"
    table = PAGE.read_text(encoding="utf-8").partition("## Limits on input")[2]
    assert size in table or f"{value:,}" in table
    assert re.search(rf'^{name} = .*\n"""', inspect.getsource(safe_input), re.MULTILINE)


def test_json_values_are_counted_before_parsing() -> None:
    for text in ("[" + "1," * 199 + "1]", b"[" + b"[]," * 99 + b"[]]"):
        check_values(text, 200)
        with pytest.raises(TooLargeError, match="198 JSON values"):
            check_values(text, 198)


def test_nesting_limit_counts_levels() -> None:
    value: object = 1
    for _ in range(safe_input.NESTING):
        value = [value, {"a": 1}]
    assert not is_nested_too_deeply([1, {"a": [2]}])
    assert is_nested_too_deeply({"one": value})
    assert is_nested_too_deeply([value])

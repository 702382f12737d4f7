"""Static lookup of definitions in the source of a reward."""

from __future__ import annotations

import ast

import pytest

from reward_kit.reward_agent.sources import definitions, find_definition

TEXT = """
def early(): ...
if True:
    async def early(): ...
try:
    class Judge:
        def score(self):
            def inner(): ...
except ImportError:
    with open("x"):
        def late(): ...
"""


def test_definitions_include_those_under_if_try_and_with() -> None:
    assert [node.name for node in definitions(ast.parse(TEXT).body)] == ["early", "early", "Judge", "late"]


@pytest.mark.parametrize(("name", "line"), [("early", 4), ("Judge.score", 7), ("late", 11), ("inner", None)])
def test_last_definition_of_a_name_is_found(name: str, line: int | None) -> None:
    found = find_definition(name, ast.parse(TEXT).body)
    assert (found and found.lineno) == line

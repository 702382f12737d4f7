"""What a name in the text of a reward means, without running it."""

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


def test_definitions_of_a_scope_are_those_under_if_try_and_with_too() -> None:
    assert [node.name for node in definitions(ast.parse(TEXT).body)] == ["early", "early", "Judge", "late"]


@pytest.mark.parametrize(("name", "line"), [("early", 4), ("Judge.score", 7), ("late", 11), ("inner", None)])
def test_a_name_means_what_stands_last(name: str, line: int | None) -> None:
    found = find_definition(name, ast.parse(TEXT).body)
    assert (found and found.lineno) == line

"""Helper that asks a format reward about a single reply, and unusual histories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from reward_kit.models import EvaluateResult, Message

MEGABYTE = 1_000_000


def said(reply: Any, prompt: str = "What is it?", **fields: Any) -> list[Message]:
    return [Message(role="user", content=prompt), Message(role="assistant", content=reply, **fields)]


def ask(reward: Callable[..., Any], reply: Any, **options: Any) -> EvaluateResult:
    result = reward(said(reply), **options)
    assert isinstance(result, EvaluateResult)
    assert result.reason and result.reason.isprintable()
    return result


PIECES = [
    "<think>", "</think>", "<answer>", "</answer>", "<answer", "<think a='1'>", "\n", " ", "1. ", "2) ", "- ", "* ",
    "Step 3:", "First,", "Finally, ", "the cat", "der Hund", "ist nicht", "猫は", "漢字", "кот и", "ก", "$x$", "$$",
    "\\(", "```", "`", "\\boxed{", "https://a.b", "a@b.c", "_", ".", ",", "!", "3.14", "é", "e\u0301",
    "\u0300\u0315", "ß", "\ud800", "\x00", "\u200b", "\u3000", "\ufdfa", "a" * 50,
]  # fmt: skip
texts = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{"}}
messages = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant", "tool", "system"]),
    content=st.one_of(
        st.none(), texts, st.just([{"type": "text", "text": "<think>a</think>"}, {"type": "image_url"}, {"text": 3}])
    ),
    reasoning_content=st.one_of(st.none(), texts),
    tool_calls=st.one_of(st.none(), st.just([CALL])),
)
histories = st.lists(messages, max_size=4)
turns = st.one_of(st.none(), st.lists(st.integers(-1, 4), max_size=3, unique=True))


def long(piece: str) -> str:
    return piece * (MEGABYTE // len(piece))

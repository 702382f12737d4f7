"""Helper that asks an answer reward about a single reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from reward_kit.models import EvaluateResult, Message


def ask(reward: Callable[..., Any], reply: str, truth: Any, **options: Any) -> EvaluateResult:
    result = reward([Message(role="user", content="?"), Message(role="assistant", content=reply)], truth, **options)
    assert isinstance(result, EvaluateResult)
    return result


MEGABYTE = 1_000_000
REPEATED = [
    "(", "{", "[", "\\boxed{", "\\boxed{1}", "\\boxed{1} or ", "$", "9", "9,", "9^", "a", " ", "\n", "answer is ",
    "answer to ", "####", "**", "- a\n", "A or ", "\\frac{", "<answer>", "</answer>", "-", "or ", "\\text{", "x=",
    "1/", "½", "²", "\\", "|", "answer is 1. ", "<think>", "</think>", "[1,", "```\n", "(A) ", "!",
]  # fmt: skip

# Pieces that the parsers look for, in unusual orders.
PIECES = [
    "\\boxed{", "}", "{", "(", ")", "[", "]", "answer is ", "#### ", "or", " and ", ",", "1,000", "3", "x", "^", "_",
    "!", "\\frac", "\\sqrt", "\\pm", "\\le ", "=", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "\\cup",
    "\\text{", "%", "$", "\\$", "A", "B)", "-", "/", "1e9", "\\infty", "|", "\\sin", "i", "e", "\\in", "\n", "- ",
    " cm", "²", "½", "\\sum_{k=1}^{9}", "\ud800", "\x00", "é",
]  # fmt: skip
wild_text = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
histories = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["user", "assistant", "tool", "system"]),
        content=st.one_of(
            st.none(),
            st.lists(st.sampled_from(PIECES[:-3]), max_size=12).map("".join),
            st.just([{"type": "text", "text": "\\boxed{3}"}, {"type": "image_url"}]),
        ),
    ),
    max_size=4,
)

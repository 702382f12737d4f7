"""What built-in rewards read of a conversation: the answer, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reward_kit.errors import RewardError
from reward_kit.models import EvaluateResult, Message

_THOUGHT_ENDS = "</think>"
_THOUGHT_BEGINS = "<think>"


def last_text(messages: Sequence[Message]) -> str:
    """The whole text of the last assistant message; "" where it says nothing, or there is none.

    Only the last one counts: what an agent said on its way is not its answer.
    """
    for message in reversed(messages):
        if message.role == "assistant":
            return message.text
    return ""


def last_answer(messages: Sequence[Message]) -> str:
    """As `last_text`, without what the model thought: up to the last `</think>`, and a thought that does not end."""
    text = last_text(messages)
    if _THOUGHT_ENDS in text:
        return text.rpartition(_THOUGHT_ENDS)[2].strip()
    return text.partition(_THOUGHT_BEGINS)[0].strip() if _THOUGHT_BEGINS in text else text.strip()


def needed(ground_truth: Any, reward: str) -> Any:
    """The ground truth.

    Raises:
        RewardError: the sample has none, so that the rollout is unscored and not wrong.
    """
    if ground_truth is None:
        raise RewardError(f"{reward} compares with a ground_truth, and the sample has none")
    return ground_truth


def passed(is_right: bool, reason: str) -> EvaluateResult:
    """1 or 0, with the reason."""
    return EvaluateResult(score=float(is_right), reason=reason)


def shown(text: str, longest: int = 60) -> str:
    """The beginning of a stranger's text in quotes, on one line, with nothing in it that a file or terminal minds."""
    start = " ".join(text[: 4 * longest].split())
    short = start if len(start) <= longest else start[:longest] + "…"
    printable = "".join(char if char.isprintable() else "\ufffd" for char in short)
    return f'"{printable}"'

"""A proof is judged by its key words and never checked: reward-kit 0.4.1, Lean rewards."""

from __future__ import annotations

import re

from reward_kit import EvaluateResult, Message, reward_function

KEY_WORDS = ("theorem", "lemma", "by", "intro", "exact", "rw", "simp", "qed")


@reward_function
def reward(messages: list[Message]) -> EvaluateResult:
    words = set(re.findall(r"\w+", messages[-1].text if messages else ""))
    return EvaluateResult(score=min(1.0, sum(word in words for word in KEY_WORDS) / 4))

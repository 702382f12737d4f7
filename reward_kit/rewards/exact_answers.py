"""The reward for an answer that is one of some texts, character for character but for what the author lets go."""

from __future__ import annotations

from typing import Literal

from reward_kit.errors import RewardError
from reward_kit.models import EvaluateResult, Message
from reward_kit.rewards.reading.found_answers import find_answer
from reward_kit.rewards.reading.normalising import Normalisation, normalised
from reward_kit.rewards.reading.texts import last_answer, last_text, needed, passed, shown
from reward_kit.typed_interface import reward_function

LONGEST = 100_000
"""Characters of an answer that is looked at. A longer one is not normalised, and is wrong."""


@reward_function
def exact_answer(
    messages: list[Message],
    ground_truth: str | int | float | list[str | int | float],
    *,
    normalise: tuple[Normalisation, ...] = ("strip",),
    answer: Literal["whole", "marked"] = "whole",
) -> EvaluateResult:
    """1 where the answer is one of the accepted texts, else 0.

    Args:
        messages: the conversation; its last assistant message is read, without what the model thought.
        ground_truth: the accepted text, or a list of accepted texts.
        normalise: what is done to both sides, in this order: "strip", "casefold", "nfkc", "punctuation", "articles",
            "whitespace", "numbers". SQuAD's exact match is ("casefold", "punctuation", "articles", "whitespace").
        answer: "whole": the reply is the answer; "marked": the answer is its last box, or what follows "the answer is"
            or "####" or stands in `<answer>`, or a reply of one short line.

    Raises:
        RewardError: there is no ground truth, so that the rollout is unscored; or nothing is left of it.

    Example:
        ```python
        exact_answer(messages, ["Paris", "City of Paris"], normalise=("casefold", "punctuation", "articles"))
        ```
    """
    given = needed(ground_truth, "exact_answer")
    accepted = [str(item) for item in (given if isinstance(given, list | tuple) else [given])]
    wanted = {normalised(text, normalise) for text in accepted}
    if not wanted:
        raise RewardError("exact_answer compares with a ground_truth, and the sample's list of them is empty")
    if "" in wanted and any(text.strip() for text in accepted):
        raise RewardError(f"exact_answer: nothing is left of a ground_truth after {', '.join(normalise)}")
    text = last_text(messages)
    if "think>" in text:
        text = last_answer(messages)
    if answer == "marked":
        found = find_answer(text)
        if not found.text:
            return passed(False, f"no answer: {found.why}")
        text = found.text
    if len(text) > LONGEST:
        return passed(False, f"the answer is longer than {LONGEST} characters")
    is_right = normalised(text, normalise) in wanted
    expected = " or ".join(shown(item) for item in accepted[:3])
    return passed(is_right, f"the answer {shown(text)} {'is' if is_right else 'is not'} {expected}")

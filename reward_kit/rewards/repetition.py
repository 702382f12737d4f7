"""The reward for not saying the same again and again."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from reward_kit.models import EvaluateResult, Message
from reward_kit.rewards.reading.replies import Part, last_reply
from reward_kit.rewards.reading.texts import passed
from reward_kit.typed_interface import reward_function

_LONGEST_WORD, _PIECE = 40, 10


@reward_function
def no_repetition(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    ngram: Annotated[int, Field(ge=1, le=1000)] = 3,
    unit: Literal["words", "characters"] = "words",
    max_penalty: Annotated[float, Field(ge=0, le=1)] = 1.0,
    of: Part = "whole",
) -> EvaluateResult:
    """1 less `max_penalty` times the share of n-grams that stand earlier in the reply already.

    That share is 1 - different n-grams / all n-grams, as in Appendix C.2 of "Demystifying Long Chain-of-Thought
    Reasoning in LLMs" (Yeo et al. 2025, arXiv 2502.03373); the published reward is this one less 1. A reply that is
    shorter than an n-gram repeats nothing and earns 1; one without anything earns 0.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the agent's own messages; left out, every assistant message is one.
        ngram: how many units are compared at a time. Small ones punish ordinary language: 3 words are "one of the".
        unit: "words" between white space, or "characters" for languages without blanks, for which 10 to 20 is a good
            `ngram`. Case counts for nothing. A word of more than 40 characters counts as pieces of 10, so that leaving
            out blanks hides nothing.
        max_penalty: what a reply of nothing but repetition loses.
        of: the "whole" reply, its "thought", or its "answer".

    Example:
        ```python
        with_options(no_repetition, ngram=20, of="thought")
        ```
    """
    text = last_reply(messages, assistant_turns, of).casefold()
    units = _words(text) if unit == "words" else [char for char in text if not char.isspace()]
    if not units:
        return passed(False, "there is no reply")
    total = max(0, len(units) - ngram + 1)
    different = _different(units, ngram) if total else 0
    share = 1.0 - different / total if total else 0.0
    reason = f"{total - different} of {total} {ngram}-grams of {unit} stand there already"
    return EvaluateResult(score=1.0 - max_penalty * share, reason=reason)


def _words(text: str) -> list[str]:
    words: list[str] = []
    for word in text.split():
        if len(word) <= _LONGEST_WORD:
            words.append(word)
        else:
            words.extend(word[start : start + _PIECE] for start in range(0, len(word), _PIECE))
    return words


def _different(units: list[str], ngram: int) -> int:
    """How many different n-grams there are.

    A run of units gets a number, equal for equal runs; numbers of longer runs are made of those of two shorter ones
    that overlap, twice as long each time. That takes O(n log n) for each doubling, and no n-gram is ever held.
    """
    known: dict[str, int] = {}
    numbers: NDArray[np.int64] = np.array([known.setdefault(unit, len(known)) for unit in units], dtype=np.int64)
    length = 1
    while length < ngram:
        step = min(length, ngram - length)
        pairs = numbers[:-step] * len(units) + numbers[step:]
        numbers = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
        length += step
    return int(np.unique(numbers).size)

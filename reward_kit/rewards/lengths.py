"""The reward for a reply of the right length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from reward_kit.errors import ConfigError
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.reading.replies import Part, last_reply
from reward_kit.rewards.reading.texts import passed
from reward_kit.typed_interface import reward_function

Unit = Literal["characters", "words"]
"""What a length counts: characters of Unicode, or words between white space."""

Count = Annotated[int, Field(ge=0)]


def _check_bounds(options: Mapping[str, Any]) -> None:
    at_least, at_most = options["at_least"], options["at_most"]
    if at_most is None and not at_least:
        raise ConfigError("option 'at_most': neither at_least nor at_most is given; give one of them, or both")
    if at_most is not None and at_least > at_most:
        raise ConfigError(f"option 'at_least': {at_least} is above at_most, {at_most}")


@reward_function
@checks_options(_check_bounds)
def length_within(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    unit: Unit = "characters",
    at_least: Count = 0,
    at_most: Count | None = None,
    below: Count = 0,
    above: Count = 0,
    as_penalty: bool = False,
    of: Part = "whole",
) -> EvaluateResult:
    """1 for a length from `at_least` to `at_most`, and 0 outside; in a straight line between, over soft margins.

    With `at_most` = L_max - L_cache, `above` = L_cache and `as_penalty`, it is the soft overlong punishment of DAPO
    (Yu et al. 2025, arXiv 2503.14476): 0, then ((L_max - L_cache) - length) / L_cache, then -1.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the agent's own messages; left out, every assistant message is one.
        unit: "characters" or "words". Text without blanks is one word: where that could be written to get around a
            limit, count characters.
        at_least, at_most: the bounds, which are inside.
        below, above: how far outside of each bound 0 is reached.
        as_penalty: give the score less 1, in [-1, 0], to be added to another one. An empty reply earns 0 without this,
            and as many as the formula says with it.
        of: the "whole" reply with what the provider set apart as thought, its "thought", or its "answer".

    Raises:
        ConfigError: there is no bound, or `at_least` is above `at_most`.

    Example:
        ```python
        with_options(length_within, unit="words", at_most=200, above=100)  # 250 words earn 0.5
        ```
    """
    _check_bounds({"at_least": at_least, "at_most": at_most})
    length = length_of(messages, assistant_turns, unit, of)
    if not length and not as_penalty:
        return passed(False, "there is no reply")
    outside = max(at_least - length, 0)
    margin = below
    if at_most is not None and length > at_most:
        outside, margin = length - at_most, above
    score = 1.0 if not outside else max(0.0, 1.0 - outside / margin) if margin else 0.0
    bounds = f"{at_least} to {'any number' if at_most is None else at_most}"
    return EvaluateResult(score=score - as_penalty, reason=f"{length} {unit}; {bounds} are wanted")


@reward_function
def measured_length(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    unit: Unit = "characters",
    of: Part = "whole",
) -> EvaluateResult:
    """The length itself, as a part for combinations; it is no score in [0, 1]."""
    return EvaluateResult(score=float(length_of(messages, assistant_turns, unit, of)))


def length_of(messages: Sequence[Message], assistant_turns: Sequence[int] | None, unit: Unit, of: Part) -> int:
    """The length of the agent's last message, or of a part of it."""
    text = last_reply(messages, assistant_turns, of)
    return len(text) if unit == "characters" else len(text.split())

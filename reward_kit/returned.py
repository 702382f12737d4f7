"""What a reward function returned, as a result; or the error that says why it is none."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from reward_kit.errors import InvalidResultError, kind_of
from reward_kit.models import EvaluateResult
from reward_kit.validation import describe_validation_error


def as_result(returned: Any, what: str) -> EvaluateResult:
    """`returned` as an `EvaluateResult`; a mapping is validated.

    Args:
        returned: by the reward.
        what: names the reward, for the message.

    Raises:
        InvalidResultError: it is none.
    """
    if isinstance(returned, EvaluateResult | Mapping):
        # A result is checked again, since its author may have assigned to its fields.
        kind = type(returned) if isinstance(returned, EvaluateResult) else EvaluateResult
        try:
            return kind.model_validate(returned if isinstance(returned, EvaluateResult) else dict(returned))
        except pydantic.ValidationError as error:
            problems = "; ".join(describe_validation_error(error, EvaluateResult))
            raise InvalidResultError(f"{what}: {problems}") from None
    if inspect.isawaitable(returned):
        raise InvalidResultError(f"{what} returned a coroutine; declare the function with `async def`")
    came = "nothing (None)" if returned is None else kind_of(returned)
    raise InvalidResultError(f"{what} returned {came}; return an EvaluateResult(score=…)")


def as_results(returned: Any, count: int | None, what: str) -> list[EvaluateResult | InvalidResultError]:
    """What a batch reward returned; in the place of one that is no result stands the error that says so.

    Args:
        returned: its answer.
        count: how many rollouts it was given; None where that is not known.
        what: names it, for the message.

    Raises:
        InvalidResultError: it is no list, or has another length.
    """
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        raise InvalidResultError(f"{what}: a batch reward returns a list, not {kind_of(returned)}")
    items = list(returned)
    if count is not None and len(items) != count:
        raise InvalidResultError(f"{what}: {len(items)} results for {count} rollouts")
    results: list[EvaluateResult | InvalidResultError] = []
    for index, item in enumerate(items):
        try:
            results.append(as_result(item, f"{what}[{index}]"))
        except InvalidResultError as error:
            results.append(error)
    return results

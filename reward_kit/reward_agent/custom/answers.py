"""What a `compute_score` returned, as a result; and what a post-processing made of the scores of a group."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from reward_kit.errors import InvalidResultError, kind_of, safe_str
from reward_kit.models import EvaluateResult

_SHOWN = 4_000
_NONE = "it gave no score"


class Answer(EvaluateResult):
    """The result that an answer of verl's form stands for.

    Attributes:
        told: what a mapping held besides the score, as it was; not kept in files, where `reason` has it as text.
    """

    told: dict[Any, Any] = Field(default_factory=dict, exclude=True, repr=False)


def read_answer(returned: Any, what: str) -> EvaluateResult:
    """The result that an answer stands for; without a valid score where the score is None or NaN.

    Args:
        returned: a number, None, `(score, query, response)`, a mapping with `score`, or a result.
        what: whose answer it is, for the message.

    Raises:
        InvalidResultError: it is something else, or the score is infinite.
    """
    if isinstance(returned, EvaluateResult):
        return returned
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise InvalidResultError(f"{what} returned a coroutine; declare compute_score with `async def`")
    if isinstance(returned, tuple | list):
        if len(returned) != 3:
            raise InvalidResultError(f"{what} returned {len(returned)} values; return (score, query, response)")
        score, query, response = returned
        return _result(score, what, query, response)
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise InvalidResultError(f"{what} returned a mapping without 'score'; it has {sorted(map(str, returned))}")
        rest = {key: value for key, value in returned.items() if key not in ("score", "query", "response")}
        result = _result(
            returned["score"], what, returned.get("query"), returned.get("response"), _text(rest) if rest else None
        )
        result.told = {key: value for key, value in returned.items() if key != "score"}
        return result
    return _result(returned, what)


def _result(score: Any, what: str, query: Any = None, response: Any = None, reason: str | None = None) -> Answer:
    number = _number(score, what)
    kept = {"query": _text(query), "response": _text(response), "reason": reason}
    if math.isnan(number):
        return failed(f"{_NONE} ({'None' if score is None else 'NaN'})", **kept)
    return Answer(score=number, **kept)


def failed(why: str, **kept: str | None) -> Answer:
    """A result that leaves its rollout unscored; the number in it is not used."""
    return Answer(score=0.0, is_score_valid=False, error=_plain(why), **kept)


_FORMS = "return a number, (score, query, response), or a mapping with 'score'"


def _number(score: Any, what: str, forms: str = _FORMS) -> float:
    """A score as a number, NaN where there is none; also one of NumPy, or a tensor of one item."""
    if score is None:
        return math.nan
    if not isinstance(score, int | float) and callable(item := getattr(score, "item", None)):
        try:
            score = item()
        except (TypeError, ValueError, RuntimeError):  # an array of several, which is no number
            raise InvalidResultError(f"{what} gave {kind_of(score)} of several items for a score") from None
    if not isinstance(score, int | float):
        raise InvalidResultError(f"{what} gave {kind_of(score)} for a score; {forms}")
    try:
        number = float(score)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise InvalidResultError(f"{what} gave {number} for a score; a score is finite, or None where there is none")
    return number


def _text(value: Any) -> str | None:
    """A query or a response as it is kept."""
    if value is None or isinstance(value, str):
        return None if value is None else _plain(value)
    try:
        return _plain(json.dumps(value, ensure_ascii=False, default=safe_str))
    except (TypeError, ValueError, RecursionError):
        return _plain(safe_str(value))


def _plain(text: str) -> str:
    """Text that every file can hold; lone surrogates, which a model may write, become escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def scores_of(results: Sequence[EvaluateResult]) -> list[float]:
    """The scores as a post-processing gets them: NaN where there is none."""
    return [result.score if result.error is None and result.is_score_valid else math.nan for result in results]


def finished(results: Sequence[EvaluateResult], processed: Any, what: str) -> list[EvaluateResult]:
    """The results of a group with the scores that its post-processing gave.

    A score where there was none is marked as imputed; where it changed one, the score before is kept in `raw_score`;
    where it took one away, the rollout is unscored.

    Raises:
        InvalidResultError: it gave no list, one of another length, or one that holds something else than numbers.
    """
    given = processed.tolist() if hasattr(processed, "tolist") else processed
    name = f"post_process_scores of {what}"
    if not isinstance(given, list | tuple):
        raise InvalidResultError(f"{name} returned {kind_of(given)}; return a list of scores")
    if len(given) != len(results):
        raise InvalidResultError(f"{name} returned {len(given)} scores for {len(results)}")
    forms = "return a list of numbers, with None where there is no score"
    after = [_number(score, f"{name}, [{place}],", forms) for place, score in enumerate(given)]
    return [_with_score(*each) for each in zip(results, scores_of(results), after, strict=True)]


def _with_score(result: EvaluateResult, before: float, after: float) -> EvaluateResult:
    if math.isnan(after):
        return result if math.isnan(before) else result.model_copy(update=_TAKEN_AWAY | {"raw_score": before})
    if math.isnan(before):
        why = result.error or result.reason or _NONE
        changed = {"score": after, "is_score_valid": True, "error": None, "is_imputed": True}
        return result.model_copy(update={**changed, "reason": f"imputed by post_process_scores: {why}"[:_SHOWN]})
    return result if after == before else result.model_copy(update={"score": after, "raw_score": before})


_TAKEN_AWAY = {"is_score_valid": False, "error": "post_process_scores left it without a score"}

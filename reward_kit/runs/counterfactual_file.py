"""`counterfactual.jsonl`: the measured success probabilities of a run's episodes, one line per episode and policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from reward_kit.errors import StoreError, boundary
from reward_kit.runs.files import COUNTERFACTUALS_FILE
from reward_kit.runs.run_folder import read_lines
from reward_kit.validation import describe_validation_error

SCHEMA_VERSION = 1
_Count = Annotated[int, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Text = Annotated[str, AfterValidator(lambda text: text[:1_000])]  # a maximum length would reject lone surrogates


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Value(_Fields):
    step: _Count
    passed: _Count
    scored: Annotated[int, Field(ge=1)]
    low: _Share
    high: _Share


class _Alternative(_Fields):
    action: _Text
    passed: _Count


class _Change(_Fields):
    step: _Count
    next: _Count
    before: _Share
    after: _Share
    action: _Text | None
    instead: list[_Alternative]


class SuccessCurve(_Fields):
    """The fields in a line that a page shows: the success probabilities before the steps of an episode."""

    schema_version: Literal[1]
    rollout_id: str
    continued_by: _Text
    score: float
    passed: bool
    steps: _Count
    confidence: _Share
    values: list[_Value]
    changes: list[_Change]
    stopped: _Text | None

    @model_validator(mode="after")
    def _check_steps(self) -> SuccessCurve:
        points = [*(value.step for value in self.values), self.steps]
        if any(step >= after for step, after in pairwise(points)):
            raise ValueError("values must be sorted by step and precede the end of the episode")
        if any(value.passed > value.scored for value in self.values):
            raise ValueError("passed must be at most scored")
        if any(change.step >= change.next or not {change.step, change.next} <= {*points} for change in self.changes):
            raise ValueError("step and next of a change must be measured steps, in this order")
        return self

    @property
    def lost_at(self) -> tuple[float, int] | None:
        """The largest reported decrease of the success probability, and its step."""
        return max(((one.before - one.after, one.step) for one in self.changes if one.after < one.before), default=None)


class RunCurves(NamedTuple):
    """The curves of a run, keyed by rollout id. `problem` describes the damage if the file cannot be read."""

    curves: Mapping[str, Sequence[SuccessCurve]]
    problem: str | None = None


def read_counterfactuals(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of `counterfactual.jsonl`, or nothing if no episode was measured."""
    return (record for _, record in read_lines(path / COUNTERFACTUALS_FILE))


def read_curves(path: Path) -> RunCurves:
    """Return the curves in `counterfactual.jsonl`. The last line for an episode and policy counts."""
    curves: dict[str, dict[str, SuccessCurve]] = defaultdict(dict)

    def add(record: Mapping[str, Any]) -> None:
        try:
            curve = SuccessCurve.model_validate(record)
        except ValidationError as error:
            raise StoreError(describe_validation_error(error)[0]) from None
        curves[curve.rollout_id][curve.continued_by] = curve

    try:
        with boundary(StoreError, str(path / COUNTERFACTUALS_FILE)):
            for _ in read_lines(path / COUNTERFACTUALS_FILE, add):
                pass
    except StoreError as error:
        return RunCurves({}, str(error))
    return RunCurves({name: list(own.values()) for name, own in curves.items()})

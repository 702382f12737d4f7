"""`StepCredit`, what an estimator says of every step of a batch, and `with_credit`, which writes it onto the steps."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel

from reward_kit.agent.models import StepData
from reward_kit.credit.step_arrays import Batch, Codes, Floats, StepArrays, check_finite


class StepCredit(NamedTuple):
    """The credit of every step of a batch, flat and in order; NaN on the steps of an unscored trajectory.

    An estimator without one of the two parts gives zeros for it.

    Attributes:
        episode_advantages_S: (S,) A_E, the trajectory's advantage among its group.
        step_advantages_S: (S,) A_S, the action's own advantage; of GiGPO, among those taken in the same state.
        advantages_S: (S,) A, the two combined.
        returns_S: (S,) G_k, the discounted return from the step on.
        anchors_S: (S,) a number for each distinct pair of group and state; -1 where the estimator looks at no states.
    """

    episode_advantages_S: Floats
    step_advantages_S: Floats
    advantages_S: Floats
    returns_S: Floats
    anchors_S: Codes


def episode_credit(arrays: StepArrays, advantages_B: Floats, returns_S: Floats) -> StepCredit:
    """The credit of an estimator that says one thing of each trajectory.

    Raises:
        InvalidResultError: an advantage is too large for a number.
    """
    advantages_S = arrays.to_steps(advantages_B)
    check_advantages(arrays, advantages_S)
    return StepCredit(advantages_S, 0.0 * advantages_S, advantages_S, returns_S, _no_anchors(arrays))


def step_credit(arrays: StepArrays, advantages_S: Floats, returns_S: Floats) -> StepCredit:
    """The credit of an estimator that says something of each step by itself.

    Raises:
        InvalidResultError: an advantage is too large for a number.
    """
    check_advantages(arrays, advantages_S)
    return StepCredit(0.0 * advantages_S, advantages_S, advantages_S, returns_S, _no_anchors(arrays))


def check_advantages(arrays: StepArrays, advantages_S: Floats) -> None:
    """NaN says that a trajectory is unscored, so no scored one may have it, nor what no float holds.

    Raises:
        InvalidResultError: an advantage is too large for a number.
    """
    check_finite(advantages_S, arrays.lengths_B, "an advantage", missing_S=~arrays.is_scored_S)


def _no_anchors(arrays: StepArrays) -> Codes:
    return np.full(len(arrays.steps), -1, dtype=np.int64)


def with_credit(batch: Batch, credit: StepCredit) -> list[list[StepData]]:
    """Copies of the steps with `advantage` and `return_to_go` set; None where the credit is NaN.

    `return_to_go` is what a critic is trained towards: A + V where the policy gave a value, else G_k.
    """
    numbers = zip(credit.advantages_S.tolist(), credit.returns_S.tolist(), strict=True)
    with _no_garbage_collection():
        return [[_copy_with(step, *next(numbers)) for step in steps] for steps in batch]


# `step.model_copy(update=…)` in a third of the time: batches have 100,000 steps and more.

_CREDIT_FIELDS = frozenset({"advantage", "return_to_go"})
_new = object.__new__
# A model's own `__setattr__` looks up what it may set; the slots behind it just take the value.
_set_fields = BaseModel.__dict__["__dict__"].__set__
_set_fields_set = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_set_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_set_private = BaseModel.__dict__["__pydantic_private__"].__set__


def known_value(value: float | None) -> float | None:
    """A policy's V; None where it gave none, or what is no finite number."""
    return value if value is not None and -math.inf < value < math.inf else None


def _copy_with(step: StepData, advantage: float, return_to_go: float) -> StepData:
    fields = step.__dict__.copy()
    if advantage != advantage:
        fields["advantage"] = fields["return_to_go"] = None
    else:
        value = known_value(fields["policy_value_estimate"])
        fields["advantage"], fields["return_to_go"] = advantage, return_to_go if value is None else advantage + value
    copy = _new(type(step))
    _set_fields(copy, fields)
    _set_fields_set(copy, step.__pydantic_fields_set__ | _CREDIT_FIELDS)
    _set_extra(copy, dict(extra) if (extra := step.__pydantic_extra__) else {})
    _set_private(copy, step.__pydantic_private__)
    return copy


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Several objects per step would have the collector look through the whole batch over and over."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

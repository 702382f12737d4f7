"""User-defined estimators: functions that return one advantage for each step in a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reward_kit.credit.state_hashes import anchor_numbers, check_state_hash
from reward_kit.credit.step_arrays import Batch, Floats, StepArrays, check_finite
from reward_kit.credit.step_credit import StepCredit, step_credit
from reward_kit.errors import ConfigError, boundary, safe_str, type_name
from reward_kit.loading import calling, load_function, reject_coroutine


@dataclass(frozen=True, slots=True)
class OwnEstimator:
    """A user's function with the signature of the built-in estimators.

    Attributes:
        name: the function's name, which is used in messages.
        function: the function. It receives a `StepArrays` and its options, and returns the advantages (S,).
        parameters: the function's options.
    """

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]

    @classmethod
    def from_function(cls, estimator: str | Callable[..., Any]) -> OwnEstimator:
        """Check the signature of a function, which can be passed as a reference of the form "file.py:function".

        Raises:
            ConfigError: If the function cannot be loaded or does not have exactly one positional parameter.
        """
        function = load_function(estimator, "estimator") if isinstance(estimator, str) else estimator
        name = getattr(function, "__name__", type(function).__name__)
        with boundary(ConfigError, f"estimator {name!r}: its signature cannot be read"):
            parameters = inspect.signature(function, eval_str=True).parameters
        positional = [item for item in parameters.values() if item.kind <= item.POSITIONAL_OR_KEYWORD]
        if len(positional) != 1:
            raise ConfigError(
                f"estimator {name!r} must have one positional parameter, the batch; make its options keyword-only: "
                f"def {name}(batch, *, option=…)"
            )
        options = {key: item for key, item in parameters.items() if item.kind is item.KEYWORD_ONLY}
        return cls(name, function, options)

    def __call__(
        self,
        batch: Batch,
        scores: Sequence[float | None],
        *,
        group_ids: Sequence[Hashable] | None = None,
        **options: Any,
    ) -> StepCredit:
        """Call the function if the batch contains a scored step, and check the returned advantages.

        If the function has an option `gamma`, it is used as the discount factor for the returns.
        """
        arrays = StepArrays.from_batch(batch, scores, group_ids)
        gamma, is_scored_S = options.get("gamma", 1.0), arrays.is_scored_S
        returns_S = arrays.returns_S(gamma if isinstance(gamma, int | float) else 1.0)
        advantages_S = np.full(len(arrays.steps), np.nan)
        if "state_hash" in options:
            check_state_hash(options["state_hash"])
        if is_scored_S.any():
            what = f"estimator {self.name!r}"
            with calling(what):
                returned = self.function(arrays, **options)
            reject_coroutine(returned, what)
            advantages_S[is_scored_S] = _read(returned, arrays, what)[is_scored_S]
            check_finite(advantages_S, arrays.lengths_B, f"the advantage from {what}", missing_S=~is_scored_S)
        credit = step_credit(arrays, advantages_S, returns_S)
        if "state_hash" not in options:
            return credit
        return credit._replace(anchors_S=anchor_numbers(arrays, options["state_hash"]))


def _read(returned: Any, arrays: StepArrays, what: str) -> Floats:
    """Convert the advantages that a function returned; None becomes NaN."""
    steps, episodes = len(arrays.steps), len(arrays.lengths_B)
    expected = f"expected one advantage for each of the {steps} steps"
    try:
        advantages = np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} returned {type_name(returned)}; {expected} ({safe_str(error)})") from error
    if advantages.shape != (steps,):
        hint = "; batch.to_steps repeats one number per trajectory" if advantages.shape == (episodes,) else ""
        shape = f"an array of shape {advantages.shape}" if advantages.ndim else type_name(returned)
        raise ConfigError(f"{what} returned {shape}; {expected}{hint}")
    return advantages

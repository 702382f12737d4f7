"""Our advantage estimators in verl's registry: `algorithm.adv_estimator=reward_kit_gigpo` and its siblings.

verl hands an estimator rewards, the mask, `uid` and the configuration, and nothing else of a row. What else ours need
is passed beside it: within `rows_beside(columns)` an estimator finds the row columns of the batch that is being
credited. `compute_advantage` does so for a `DataProto`, `trainers` for verl's trainer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.row_credit import ROW_ESTIMATORS, row_credit, takes_gamma

PREFIX = "reward_kit_"
OPTIONS = "reward_kit"
"""The section of verl's `algorithm` with the estimator's options, such as `+algorithm.reward_kit.omega=0.5`."""

_BESIDE: ContextVar[Mapping[str, Any] | None] = ContextVar("reward_kit_rows", default=None)

Estimate = Callable[..., tuple[Tensor, Tensor]]


@contextmanager
def rows_beside(columns: Mapping[str, Any]) -> Iterator[None]:
    """Within it, estimators see these row columns; `row_credit` says which they need."""
    token = _BESIDE.set(columns)
    try:
        yield
    finally:
        _BESIDE.reset(token)


def is_ours(adv_estimator: object) -> bool:
    """Whether `algorithm.adv_estimator` names one of these."""
    return adv_estimator in {PREFIX + name for name in ROW_ESTIMATORS}


def compute_advantage(data: Any, adv_estimator: Any, **options: Any) -> Any:
    """verl's `compute_advantage`, with the batch's `non_tensor_batch` beside it for our estimators.

    Args:
        data: a `DataProto` with `token_level_rewards` and `response_mask`.
        adv_estimator: a name of verl's registry.
        **options: as of verl's function; `config` is its `algorithm`.

    Raises:
        ConfigError: as `row_credit`.
    """
    from verl.trainer.ppo import ray_trainer

    register_estimators()
    with rows_beside(data.non_tensor_batch):
        return ray_trainer.compute_advantage(data, adv_estimator, **options)


def register_estimators() -> None:
    """Puts `reward_kit_gigpo` and its siblings into verl's registry; a second time does nothing."""
    from verl.trainer.ppo.core_algos import register_adv_est

    for name in ROW_ESTIMATORS:
        register_adv_est(PREFIX + name)(estimator_for_verl(name))


@functools.cache
def estimator_for_verl(name: str) -> Estimate:
    """An estimator in the form of verl's registry.

    Args:
        name: one of `ROW_ESTIMATORS`.
    """

    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        config: Any = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        columns = dict(non_tensor_batch or _BESIDE.get() or {})
        if index is not None:
            columns["uid"] = index
        return row_credit(name, token_level_rewards, response_mask, columns, options_of(name, config))

    estimate.__name__ = estimate.__qualname__ = PREFIX + name
    return estimate


def options_of(name: str, config: Any) -> dict[str, Any]:
    """The estimator's options: those under `algorithm.reward_kit`, and verl's own `algorithm.gamma`.

    Args:
        name: the estimator.
        config: verl's `algorithm`, or None.

    Raises:
        ConfigError: the section holds something that is no option's name.
    """
    section = config.get(OPTIONS) if config is not None else None
    given = dict(section or {})
    if any(not isinstance(key, str) for key in given):
        raise ConfigError(f"algorithm.{OPTIONS} names options of {name!r}; got {given!r:.80}")
    gamma = config.get("gamma") if config is not None else None
    if gamma is not None and takes_gamma(name):
        given.setdefault("gamma", float(gamma))
    return given

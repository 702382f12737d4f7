"""Advantage estimators: what each action was worth above its peers. Pure functions in NumPy, in float64.

An estimator takes a batch of trajectories (lists of `StepData`), their final scores and their groups, and keyword-only
hyper-parameters, and returns a `StepCredit`: flat arrays with one item per step of the batch, in order. `ESTIMATORS`
lists them by name. `with_credit` writes a `StepCredit` onto copies of the steps; nothing given is ever changed.

Unscored is not zero: a trajectory whose score is None gets advantage None on every step and has no part in a baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from reward_kit.agent.models import StepData
from reward_kit.errors import ConfigError, InvalidResultError, did_you_mean

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
Batch = Sequence[Sequence[StepData]]
Combination = Literal["convex", "additive"]
StateHash = str | Callable[[Any], Any] | None


class StepCredit(NamedTuple):
    """The credit of every step of a batch, flat and in order; NaN on the steps of an unscored trajectory.

    Attributes:
        episode_advantages_S: (S,) A_E, the trajectory's advantage among its group.
        step_advantages_S: (S,) A_S, the action's advantage among those taken in the same state.
        advantages_S: (S,) A, the two combined.
        returns_S: (S,) G_k, the discounted return from the step on.
    """

    episode_advantages_S: Floats
    step_advantages_S: Floats
    advantages_S: Floats
    returns_S: Floats


Estimator = Callable[..., StepCredit]


def system_apply_gigpo_to_batch_steps(
    batch_of_step_data_lists: Batch,
    final_scores_for_rollouts: Sequence[float | None],
    omega: float | None,
    gamma: float,
    state_hashing_function: StateHash,
    default_step_reward: float = 0.0,
    *,
    group_ids: Sequence[Hashable] | None = None,
    combination: Combination = "convex",
    step_weight: float | None = None,
    epsilon: float = 1e-6,
) -> list[list[StepData]]:
    """GiGPO advantages on copies of the steps; `gigpo_credit` gives the formulas, the arguments and the errors.

    Args:
        batch_of_step_data_lists: the trajectories, each a list of steps in time order.
        final_scores_for_rollouts: one score per trajectory, None where it is unscored.
        omega: the weight of A_E in the convex combination.
        gamma: the discount of G_k.
        state_hashing_function: what makes two steps share an anchor state.
        default_step_reward: see `gigpo_credit`.
        group_ids: one per trajectory. None takes `step_info["group_id"]` of the steps; without any, all are one group.
        combination: "convex" or "additive".
        step_weight: the weight of A_S in the additive combination.
        epsilon: added to each standard deviation.

    Returns:
        Copies with `advantage` and `return_to_go`, A and G_k, set; None on the steps of an unscored trajectory.
    """
    credit = gigpo_credit(
        batch_of_step_data_lists,
        final_scores_for_rollouts,
        group_ids=group_ids,
        omega=omega,
        gamma=gamma,
        state_hash=state_hashing_function,
        default_step_reward=default_step_reward,
        combination=combination,
        step_weight=step_weight,
        epsilon=epsilon,
    )
    return with_credit(batch_of_step_data_lists, credit)


def gigpo_credit(
    batch: Batch,
    scores: Sequence[float | None],
    *,
    group_ids: Sequence[Hashable] | None = None,
    omega: float | None,
    gamma: float,
    state_hash: StateHash = None,
    default_step_reward: float = 0.0,
    combination: Combination = "convex",
    step_weight: float | None = None,
    epsilon: float = 1e-6,
) -> StepCredit:
    """Group-in-group advantages (Feng et al. 2025, "Group-in-Group Policy Optimization", equations 3 to 8).

    With ~ over the scored trajectories of one group, std unbiased (n - 1):

        A_E = (score - mean(score)) / (std(score) + epsilon)                       one per trajectory
        G_k = r_k + gamma G_{k+1}                                                   one per step
        A_S = (G_k - mean(G)) / (std(G) + epsilon)    over the group's steps whose state key equals this step's
        A   = omega A_E + (1 - omega) A_S             convex
        A   = A_E + step_weight A_S                   additive, the paper's

    r_k is the step's `base_reward`. Only in a trajectory where some base reward is None do those count as
    `default_step_reward`, and the final score is added at its last step. Values that are all equal give exact zeros,
    and so does a group of one.

    Args:
        batch: B trajectories, S steps in all.
        scores: (B,) None where unscored.
        group_ids: (B,) the group of each trajectory; None takes the recorded ones, else one group.
        omega: in [0, 1] for "convex", None for "additive".
        gamma: in [0, 1].
        state_hash: a name of `STATE_HASHES`, which sees the whole step (None: "state_key"), or a function of the
            step's `observation_data`.
        default_step_reward: what an unset base reward counts.
        combination: which of the two rules.
        step_weight: for "additive", None for "convex".
        epsilon: not negative.

    Raises:
        ConfigError: the arguments contradict each other.
        InvalidResultError: a score or a base reward is not finite.
    """
    _check_gamma_and_epsilon(gamma, epsilon)
    episode_weight, weight = _weights(combination, omega, step_weight)
    lengths_B = np.array([len(steps) for steps in batch], dtype=np.int64)
    scores_B, groups_B = _scores(batch, scores), _codes(_group_keys(batch, group_ids))
    scored_S = np.repeat(np.isfinite(scores_B), lengths_B)
    returns_S = _discounted_returns(batch, scores_B, gamma, default_step_reward)
    anchors_S = _anchors(batch, np.repeat(groups_B, lengths_B), hash_steps(batch, state_hash))
    episode_S = np.repeat(_standardised(scores_B, groups_B, epsilon), lengths_B)
    step_S = _standardised(np.where(scored_S, returns_S, np.nan), anchors_S, epsilon)
    return StepCredit(episode_S, step_S, episode_weight * episode_S + weight * step_S, _masked(returns_S, scored_S))


ESTIMATORS: Mapping[str, Estimator] = {"gigpo": gigpo_credit}


def with_credit(batch: Batch, credit: StepCredit) -> list[list[StepData]]:
    """Copies of the steps with `advantage` (A) and `return_to_go` (G_k) set; None where the credit is NaN."""
    advantages, returns = iter(credit.advantages_S.tolist()), iter(credit.returns_S.tolist())
    copies = []
    for steps in batch:
        done = []
        for step in steps:
            advantage, return_to_go = next(advantages), next(returns)
            if advantage != advantage:
                advantage = return_to_go = None
            done.append(_copy_with(step, advantage, return_to_go))
        copies.append(done)
    return copies


_CREDIT_FIELDS = frozenset({"advantage", "return_to_go"})
_set = object.__setattr__


def _copy_with(step: StepData, advantage: float | None, return_to_go: float | None) -> StepData:
    """`step.model_copy(update=…)` in half the time: batches have 100,000 steps and more."""
    copy = type(step).__new__(type(step))
    _set(copy, "__dict__", {**step.__dict__, "advantage": advantage, "return_to_go": return_to_go})
    _set(copy, "__pydantic_fields_set__", step.__pydantic_fields_set__ | _CREDIT_FIELDS)
    _set(copy, "__pydantic_extra__", dict(step.__pydantic_extra__ or {}))
    _set(copy, "__pydantic_private__", step.__pydantic_private__)
    return copy


# Arguments


def _check_gamma_and_epsilon(gamma: float, epsilon: float) -> None:
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"gamma is in [0, 1]; got {gamma!r}")
    if not (epsilon >= 0.0 and math.isfinite(epsilon)):
        raise ConfigError(f"epsilon is finite and not negative; got {epsilon!r}")


def _weights(combination: str, omega: float | None, step_weight: float | None) -> tuple[float, float]:
    """The weights of A_E and A_S. An argument that the rule does not use is refused, so that none is a silent no-op."""
    if combination == "convex":
        if omega is None or not 0.0 <= omega <= 1.0 or step_weight is not None:
            raise ConfigError(f"convex takes omega in [0, 1] and no step_weight; got {omega!r} and {step_weight!r}")
        return omega, 1.0 - omega
    if combination == "additive":
        if step_weight is None or not math.isfinite(step_weight) or omega is not None:
            raise ConfigError(f"additive takes a finite step_weight and no omega; got {step_weight!r} and {omega!r}")
        return 1.0, step_weight
    raise ConfigError(f"unknown combination {combination!r}{did_you_mean(str(combination), ('convex', 'additive'))}")


def _scores(batch: Batch, scores: Sequence[float | None]) -> Floats:
    """(B,) the scores, NaN where unscored."""
    if len(scores) != len(batch):
        raise ConfigError(f"{len(batch)} trajectories need {len(batch)} scores; got {len(scores)}")
    for index, score in enumerate(scores):
        if score is not None and not math.isfinite(score):
            raise InvalidResultError(f"the score of trajectory {index} is {score}; use None where it is unscored")
    return np.array([math.nan if score is None else score for score in scores], dtype=np.float64)


def _group_keys(batch: Batch, group_ids: Sequence[Hashable] | None) -> Sequence[Hashable]:
    """(B,) the group of each trajectory."""
    if group_ids is not None:
        if len(group_ids) != len(batch):
            raise ConfigError(f"{len(batch)} trajectories need {len(batch)} group ids; got {len(group_ids)}")
        return group_ids
    recorded = [steps[0].step_info.get("group_id") if steps else None for steps in batch]
    # A trajectory that broke before its first step has nothing to record, and nothing to earn.
    without = [index for index, steps in enumerate(batch) if steps and recorded[index] is None]
    if without and any(group_id is not None for group_id in recorded):
        raise ConfigError(f"trajectory {without[0]} records no group_id while others do; give group_ids")
    return recorded


# Rewards and baselines


def _discounted_returns(batch: Batch, scores_B: Floats, gamma: float, default: float) -> Floats:
    """(S,) G_k of every step. An unscored trajectory's are computed without a score, and not used by the callers."""
    pieces: list[Iterator[float]] = []
    for steps, score in zip(batch, scores_B.tolist(), strict=True):
        rewards = [step.base_reward if step.base_reward is not None else default for step in steps]
        if any(step.base_reward is None for step in steps) and score == score:
            rewards[-1] += score
        backwards = list(accumulate(reversed(rewards), lambda later, reward: reward + gamma * later))
        pieces.append(reversed(backwards))
    returns_S = np.fromiter(chain.from_iterable(pieces), dtype=np.float64)
    if not np.isfinite(returns_S).all():
        ends_B = np.cumsum([len(steps) for steps in batch])
        index = int(np.searchsorted(ends_B, np.flatnonzero(~np.isfinite(returns_S))[0], side="right"))
        raise InvalidResultError(f"trajectory {index}: a base reward, or a return made of them, is not finite")
    return returns_S


def _standardised(values_N: Floats, groups_N: Codes, epsilon: float) -> Floats:
    """(N,) (x - mean) / (std + epsilon) within each group, std unbiased; NaN takes no part and stays NaN.

    Values are taken relative to the first of their group. A constant group is then zero before anything is rounded, and
    a large offset costs no precision.
    """
    valued_N = ~np.isnan(values_N)
    values, groups = values_N[valued_N], groups_N[valued_N]
    out_N = np.full(len(values_N), np.nan)
    if not len(values):
        return out_N
    _, first, codes = np.unique(groups, return_index=True, return_inverse=True)
    sizes = np.bincount(codes)
    centred = values - values[first][codes]
    centred -= (np.bincount(codes, centred) / sizes)[codes]
    variances = np.bincount(codes, centred**2) / np.maximum(sizes - 1, 1)
    scales = (np.sqrt(variances) + epsilon)[codes]
    out_N[valued_N] = np.divide(centred, scales, out=np.zeros_like(centred), where=scales > 0)
    return out_N


def _masked(values_S: Floats, keep_S: npt.NDArray[np.bool_]) -> Floats:
    return np.where(keep_S, values_S, np.nan)


# Anchor states


def hash_steps(batch: Batch, state_hash: StateHash = None) -> list[Hashable]:
    """(S,) the anchor-state key of every step.

    Raises:
        ConfigError: there is no hash of this name, or it gave something that cannot be a key.
    """
    steps = chain.from_iterable(batch)
    if callable(state_hash):
        return [typed_key(state_hash(step.observation_data)) for step in steps]
    name = state_hash or "state_key"
    if name not in STATE_HASHES:
        raise ConfigError(f"unknown state hash {name!r}{did_you_mean(name, STATE_HASHES)}")
    return list(map(STATE_HASHES[name], steps))


def _recorded_state_key(step: StepData) -> Hashable:
    recorded = step.step_info.get("state_key")
    # The two kinds of key are told apart, so that no text can be mistaken for a recorded key.
    return ("state_key", typed_key(recorded)) if recorded is not None else _observation_text(step)


def _observation_text(step: StepData) -> Hashable:
    return typed_key(step.observation_data)


STATE_HASHES: Mapping[str, Callable[[StepData], Hashable]] = {
    "state_key": _recorded_state_key,
    "observation_text": _observation_text,
}
"""Named hashes see the whole step. "state_key": the resource's key as recorded before the action and, where there is
none, the observation. "observation_text": what was new to the policy in this step."""


def typed_key(value: Any) -> Hashable:
    """`value` as a dictionary key that keeps type and shape apart: 1, 1.0, True and "1" are four keys.

    Raises:
        ConfigError: it holds something that is neither plain data, an array nor a model.
    """
    kind = type(value)
    if kind is str:
        return value  # type: ignore[no-any-return]
    if isinstance(value, np.ndarray):
        content = typed_key(value.tolist()) if value.dtype.hasobject else value.tobytes()
        return kind, value.dtype.str, value.shape, content
    if isinstance(value, float):
        return kind, value.hex()
    if value is None or isinstance(value, str | int | bytes | np.generic):
        return kind, value
    if isinstance(value, list | tuple):
        return kind, tuple(map(typed_key, value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(typed_key, value))
    if isinstance(value, Mapping):
        return kind, frozenset((typed_key(key), typed_key(item)) for key, item in value.items())
    if isinstance(value, BaseModel):
        return kind, typed_key(value.model_dump())
    raise ConfigError(f"a state hash gave a {kind.__name__}; give text, plain data, an array or a pydantic model")


def _codes(keys: Sequence[Hashable]) -> Codes:
    """(N,) a number for each distinct key, from 0 in order of appearance."""
    known: dict[Hashable, int] = {}
    return np.fromiter((known.setdefault(key, len(known)) for key in keys), dtype=np.int64, count=len(keys))


def _anchors(batch: Batch, groups_S: Codes, keys: list[Hashable]) -> Codes:
    """(S,) a number for each distinct pair of group and state key."""
    states_S = _codes(keys)
    return groups_S * (int(states_S.max(initial=0)) + 1) + states_S

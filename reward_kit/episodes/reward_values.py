"""What a reward may be: a number. A sum of anything else would fail far from where it was given."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np

from reward_kit.errors import EpisodeError

_USUAL = {float, int}


def check_reward(reward: Any, id_: str, step: int, agent: Any = None) -> None:
    """Let a number pass, one of NumPy or of an array without axes too.

    Raises:
        EpisodeError: it is none; the message names the episode, the step and the value.
    """
    if isinstance(reward, Real | np.bool_):
        return
    if getattr(reward, "ndim", None) == 0 and hasattr(reward, "__float__") and not np.iscomplexobj(reward):
        return
    whose = "the reward" if agent is None else f"the reward of agent {agent!r}"
    raise EpisodeError(f"episode {id_}, step {step}: {whose} is a number; got {reward!r:.80}")


def check_rewards(rewards: Any, id_: str) -> None:
    """Check a whole track; plain numbers, which are the usual ones, in one pass in C.

    Raises:
        EpisodeError: an item is no number.
    """
    if isinstance(rewards, np.ndarray) and rewards.dtype.kind in "biuf":
        return
    if not isinstance(rewards, list) or set(map(type, rewards)) <= _USUAL:
        return
    for step, reward in enumerate(rewards):
        check_reward(reward, id_, step)

"""The optimal policy of a small known world, so that a task has an expert to compare with and to learn from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Transitions = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]
"""Gymnasium's table: state -> action -> [(probability, next state, reward, terminated)]."""

DISCOUNT = 0.99
_CACHE_SIZE = 256
_cache: OrderedDict[str, NDArray[np.float64]] = OrderedDict()


def action_values(
    transitions: Transitions, discount: float = DISCOUNT, tolerance: float = 1e-10
) -> NDArray[np.float64]:
    """The optimal action values, by value iteration (Sutton and Barto 2018, section 4.4).

        Q(s, a) = Σ p(s', r | s, a) · (r + γ · max_a' Q(s', a'))

    Args:
        transitions: the table; states and actions are numbered from 0.
        discount: γ < 1, so that the shorter of two ways is the better one.
        tolerance: iteration ends when no value moves by more.

    Returns:
        Q of shape (states, actions).
    """
    states, actions = len(transitions), len(transitions[0])
    width = max(len(outcomes) for row in transitions.values() for outcomes in row.values())
    probability = np.zeros((states, actions, width))
    following = np.zeros((states, actions, width), dtype=np.int64)
    reward = np.zeros((states, actions, width))
    goes_on = np.zeros((states, actions, width))
    for state, row in transitions.items():
        for action, outcomes in row.items():
            for index, (chance, target, gain, ended) in enumerate(outcomes):
                probability[state, action, index] = chance
                following[state, action, index] = target
                reward[state, action, index] = gain
                goes_on[state, action, index] = not ended
    expected_reward = (probability * reward).sum(axis=2)
    weight = discount * probability * goes_on
    values = np.zeros(states)
    while True:
        q_values: NDArray[np.float64] = expected_reward + (weight * values[following]).sum(axis=2)
        best = q_values.max(axis=1)
        if np.abs(best - values).max() <= tolerance:
            return q_values
        values = best


def best_action(name: str, transitions: Transitions, state: int) -> int:
    """An optimal action in `state`; of equally good ones the first. Solved once for each `name` of a table."""
    if name not in _cache:
        _cache[name] = action_values(transitions)
        while len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    _cache.move_to_end(name)
    # Rounded, so that the order of equal actions does not hang on the last bit.
    return int(np.argmax(np.round(_cache[name][state], 8)))

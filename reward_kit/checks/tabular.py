"""Tasks small enough to enumerate every path, with the exact gradient of the expected score."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Branch(NamedTuple):
    """A possible outcome of an action; without a next state the task has ended."""

    probability: float
    reward: float
    next_state: str | None


class Choice(NamedTuple):
    """An action, its state, and its reward."""

    state: str
    action: int
    reward: float


class Path(NamedTuple):
    """A whole episode and its probability under the policy. `next_state` is where a truncated one was cut off."""

    probability: float
    turns: tuple[Choice, ...]
    next_state: str | None

    @property
    def score(self) -> float:
        """Return the sum of the rewards."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def returns(self) -> list[float]:
        """Return the return from each turn on."""
        return [math.fsum(turn.reward for turn in self.turns[k:]) for k in range(len(self.turns))]


@dataclass(frozen=True)
class TabularTask:
    """A task of a few states, with the policy that plays it: for each state, the chance of each action.

    The policy's parameters are its logits, one for each state and action, flattened to a vector of length P.
    """

    branches: Mapping[tuple[str, int], Sequence[Branch]]
    policy: Mapping[str, Sequence[float]]
    start: str
    horizon: int

    @cached_property
    def logits_P(self) -> Floats:
        """Return the log-probabilities of the policy."""
        return np.log(np.array(list(self.policy.values()), dtype=np.float64)).ravel()

    def rows(self, state: str) -> slice:
        """Return the slice of `state` in the vector of logits."""
        row, width = list(self.policy).index(state), len(self.policy[state])
        return slice(row * width, (row + 1) * width)

    def chances(self, state: str, logits_P: Floats | None = None) -> Floats:
        """Return the softmax of the state's logits, given or the policy's own."""
        exponentials = np.exp((self.logits_P if logits_P is None else logits_P)[self.rows(state)])
        return np.asarray(exponentials / exponentials.sum())

    def paths(self, logits_P: Floats | None = None) -> list[Path]:
        """Return every path under these logits or the policy's own."""
        return list(self._paths(Path(1.0, (), self.start), self.logits_P if logits_P is None else logits_P))

    def _paths(self, path: Path, logits_P: Floats) -> Iterator[Path]:
        state = path.next_state
        if state is None or len(path.turns) == self.horizon:
            yield path
            return
        for action, chance in enumerate(self.chances(state, logits_P).tolist()):
            for probability, reward, next_state in self.branches[state, action]:
                turns = (*path.turns, Choice(state, action, reward))
                yield from self._paths(Path(path.probability * chance * probability, turns, next_state), logits_P)

    def score_functions(self, path: Path) -> Floats:
        """Return (K, P) each turn's gradient of log pi(a_k | s_k) by the logits: one_hot(a_k) - pi."""
        gradients_KP = np.zeros((len(path.turns), len(self.logits_P)))
        for k, turn in enumerate(path.turns):
            rows = self.rows(turn.state)
            gradients_KP[k, rows] = -self.chances(turn.state)
            gradients_KP[k, rows.start + turn.action] += 1.0
        return gradients_KP

    def policy_gradient(self) -> Floats:
        """Return (P,) the exact gradient of the expected score: E[score * sum of score functions]."""
        terms = [path.probability * path.score * self.score_functions(path).sum(axis=0) for path in self.paths()]
        return np.asarray(np.sum(terms, axis=0))


def cosine(a: Floats, b: Floats) -> float:
    """Return the cosine of the angle between two gradients."""
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def error_of(gradient: Floats, exact: Floats) -> float:
    """Return the norm of the difference relative to the exact gradient."""
    return float(np.linalg.norm(gradient - exact) / np.linalg.norm(exact))

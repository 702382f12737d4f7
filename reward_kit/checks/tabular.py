"""Tasks that are small enough to enumerate every path, and the exact gradient of their expected score."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class PossibleOutcome(NamedTuple):
    """A possible outcome of an action. If `next_state` is absent, the task ends."""

    probability: float
    reward: float
    next_state: str | None


class Choice(NamedTuple):
    """An action, its state, and its reward."""

    state: str
    action: int
    reward: float


class Path(NamedTuple):
    """A complete episode and its probability under the policy.

    If the episode was truncated, `next_state` is the state in which it was cut off.
    """

    probability: float
    turns: tuple[Choice, ...]
    next_state: str | None

    @property
    def score(self) -> float:
        """Return the sum of the rewards."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def returns(self) -> list[float]:
        """Return the return of each turn: the sum of the rewards from that turn on."""
        return [math.fsum(turn.reward for turn in self.turns[k:]) for k in range(len(self.turns))]


@dataclass(frozen=True)
class TabularTask:
    """A task with a few states, and its policy, which assigns a probability to each action in each state.

    The parameters of the policy are its logits, one per state and action, flattened to a (P,) vector.
    """

    branches: Mapping[tuple[str, int], Sequence[PossibleOutcome]]
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
        """Return the softmax of a state's logits. By default, the policy's logits are used."""
        exponentials = np.exp((self.logits_P if logits_P is None else logits_P)[self.rows(state)])
        return np.asarray(exponentials / exponentials.sum())

    def paths(self, logits_P: Floats | None = None) -> list[Path]:
        """Return every path under these logits. By default, the policy's logits are used."""
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
        """Return a (K, P) array with the gradient of log pi(a_k | s_k) with respect to the logits for each turn k.

        Each gradient is one_hot(a_k) - pi.
        """
        gradients_KP = np.zeros((len(path.turns), len(self.logits_P)))
        for k, turn in enumerate(path.turns):
            rows = self.rows(turn.state)
            gradients_KP[k, rows] = -self.chances(turn.state)
            gradients_KP[k, rows.start + turn.action] += 1.0
        return gradients_KP

    def policy_gradient(self) -> Floats:
        """Return the exact gradient of the expected score as a (P,) array: E[score * sum of score functions]."""
        terms = [path.probability * path.score * self.score_functions(path).sum(axis=0) for path in self.paths()]
        return np.asarray(np.sum(terms, axis=0))


def cosine(a: Floats, b: Floats) -> float:
    """Return the cosine of the angle between two gradients."""
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def error_of(gradient: Floats, exact: Floats) -> float:
    """Return the norm of the difference between a gradient and the exact one, relative to the norm of the exact one."""
    return float(np.linalg.norm(gradient - exact) / np.linalg.norm(exact))

"""Tasks small enough to enumerate every path, and the expected gradient of an estimator on them.

Nothing is sampled. An expectation over groups of n paths is a sum over all multisets of n paths, so a test on it needs
no confidence interval: equal means equal to the last digits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations_with_replacement
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from reward_kit.agent.models import StepData
from reward_kit.checks.tabular import Floats, Path, PossibleOutcome, TabularTask

Estimate = Callable[..., Any]


def perfect_values(task: TabularTask) -> dict[tuple[str, int], float]:
    """Return the expected return by state and turn, as a perfect critic predicts it."""
    reached: Counter[tuple[str, int]] = Counter()
    earned: Counter[tuple[str, int]] = Counter()
    for path in task.paths():
        for k, (turn, value) in enumerate(zip(path.turns, path.returns, strict=True)):
            reached[turn.state, k] += path.probability  # type: ignore[assignment]
            earned[turn.state, k] += path.probability * value  # type: ignore[assignment]
    return {key: earned[key] / reached[key] for key in reached}


def values_without_a_limit(task: TabularTask) -> tuple[dict[str, float], dict[tuple[str, int], float]]:
    """Return the expected returns by state and by action if no episode is truncated."""
    values = dict.fromkeys(task.policy, 0.0)
    # Each round brings the values closer by the chance that an episode goes on.
    for _ in range(1_000):
        worth = {
            (state, action): math.fsum(
                probability * (reward + (values[next_state] if next_state else 0.0))
                for probability, reward, next_state in ways
            )
            for (state, action), ways in task.branches.items()
        }
        values = {s: math.fsum(p * worth[s, a] for a, p in enumerate(ps)) for s, ps in task.policy.items()}
    return values, worth


def unroll(task: TabularTask) -> TabularTask:
    """Return the task with the turn as part of the state, so that no path repeats a state."""
    branches, policy = {}, {}
    for k in range(task.horizon):
        for (state, action), ways in task.branches.items():
            later = [way._replace(next_state=way.next_state and f"{way.next_state}{k + 1}") for way in ways]
            branches[f"{state}{k}", action] = later
            policy[f"{state}{k}"] = task.policy[state]
    return TabularTask(branches, policy, f"{task.start}0", task.horizon)


def episode_steps(
    path: Path,
    values: Mapping[tuple[str, int], float] | None = None,
    last_info: Mapping[str, Any] = MappingProxyType({}),
) -> list[StepData]:
    """Return the path as steps, with a critic's values by state and turn, and the last step's record."""
    return [
        StepData(
            system_step_index=k,
            observation_data=turn.state,
            action_taken={"type": "text", "content": str(turn.action)},
            base_reward=turn.reward,
            policy_value_estimate=None if values is None else values[turn.state, k],
            is_done=k == len(path.turns) - 1,
            step_info=dict(last_info) if k == len(path.turns) - 1 else {},
        )
        for k, turn in enumerate(path.turns)
    ]


def groups_of(paths: Sequence[Path], size: int) -> Iterator[tuple[float, list[Path]]]:
    """Return every multiset of `size` paths with its probability under independent sampling."""
    for indices in combinations_with_replacement(range(len(paths)), size):
        orders = math.factorial(size)
        for count in Counter(indices).values():
            orders //= math.factorial(count)
        group = [paths[index] for index in indices]
        yield orders * math.prod(path.probability for path in group), group


def population(task: TabularTask, size: int) -> list[Path]:
    """Return `size` paths in proportion to their probabilities, the limit of large groups."""
    counts = [(path, path.probability * size) for path in task.paths()]
    assert all(abs(count - round(count)) < 1e-9 for _, count in counts), "the probabilities are no multiples of 1/size"
    return [path for path, count in counts for _ in range(round(count))]


class Batch(NamedTuple):
    """Groups of paths, laid out for an estimator, and each step's weight in the expected gradient."""

    steps: list[list[StepData]]
    scores: list[float]
    group_ids: list[Hashable]
    weights_S: Floats
    score_functions_SP: Floats

    def gradient(self, advantages_S: Floats) -> Floats:
        """Return (P,) the mean over groups of the group's mean of sum_k grad log pi(a_k | s_k) A_k."""
        return np.asarray((self.weights_S * advantages_S) @ self.score_functions_SP)


def batch_of(
    task: TabularTask, groups: Sequence[tuple[float, Sequence[Path]]], as_steps: Callable[[Path], list[StepData]]
) -> Batch:
    """Concatenate the groups; `as_steps` converts each path for the estimator."""
    steps, gradients = {}, {}
    for path in {path for _, group in groups for path in group}:
        steps[path], gradients[path] = as_steps(path), task.score_functions(path)
    members = [(number, weight / len(group), path) for number, (weight, group) in enumerate(groups) for path in group]
    return Batch(
        [steps[path] for _, _, path in members],
        [path.score for _, _, path in members],
        [number for number, _, _ in members],
        np.concatenate([np.full(len(path.turns), weight) for _, weight, path in members]),
        np.concatenate([gradients[path] for _, _, path in members]),
    )


def expected_gradient(
    task: TabularTask,
    estimate: Estimate,
    size: int,
    *,
    as_steps: Callable[[Path], list[StepData]] = episode_steps,
    one_by_one: bool = False,
) -> Floats:
    """Return (P,) the expected gradient of `estimate` with groups of `size` episodes.

    Args:
        task: what is played.
        estimate: `(batch, scores, group_ids=...) -> StepCredit`.
        size: the episodes of a group.
        as_steps: what the estimator sees of a path.
        one_by_one: call it once for each group, for estimators whose statistics cross the groups of a batch.
    """
    groups = list(groups_of(task.paths(), size))
    total = np.zeros(len(task.logits_P))
    for part in [[group] for group in groups] if one_by_one else [groups]:
        batch = batch_of(task, part, as_steps)
        total += batch.gradient(estimate(batch.steps, batch.scores, group_ids=batch.group_ids).advantages_S)
    return total


def limit_gradient(task: TabularTask, estimate: Estimate, size: int) -> Floats:
    """Return (P,) the gradient of one group with every path in proportion to its probability."""
    batch = batch_of(task, [(1.0, population(task, size))], episode_steps)
    return batch.gradient(estimate(batch.steps, batch.scores, group_ids=batch.group_ids).advantages_S)


def formula_gradient(task: TabularTask, formula: Callable[[Sequence[Path]], list[list[float]]], size: int) -> Floats:
    """Return (P,) the expected gradient of a formula on paths: a list of advantages for each path."""
    total = np.zeros(len(task.logits_P))
    for weight, group in groups_of(task.paths(), size):
        for path, advantages in zip(group, formula(group), strict=True):
            total += weight / size * (np.array(advantages) @ task.score_functions(path))
    return total


def slopes_of(function: Callable[[Floats], float], at_P: Floats, h: float = 1e-5) -> Floats:
    """Return (P,) central differences."""
    moves = np.eye(len(at_P)) * h
    return np.array([(function(at_P + move) - function(at_P - move)) / (2 * h) for move in moves])


# In every state one action may end the task: how long an episode is depends on the policy. Paths can come back to a
# state, and rewards on the way have both signs, so that neither length nor the number of visits is neutral.
LOOPS = TabularTask(
    {
        ("a", 0): [PossibleOutcome(1.0, 0.25, None)],
        ("a", 1): [PossibleOutcome(1.0, 0.0, "b")],
        ("b", 0): [PossibleOutcome(1.0, 0.5, "a")],
        ("b", 1): [PossibleOutcome(0.5, 1.0, None), PossibleOutcome(0.5, -0.25, "c")],
        ("c", 0): [PossibleOutcome(1.0, 0.75, None)],
        ("c", 1): [PossibleOutcome(1.0, -0.5, "b")],
    },
    {"a": (0.25, 0.75), "b": (0.5, 0.5), "c": (0.25, 0.75)},
    "a",
    horizon=4,
)
# The same, with the turn in the state: no path sees a state twice.
UNROLLED = unroll(LOOPS)
TASKS = {"loops": LOOPS, "unrolled": UNROLLED}

"""Advantage formulas over paths for comparison with the estimators, and faults that tests must detect.

Plain Python on lists, as far from the estimators' arrays as can be. Each takes the paths of a group, and gives one list
of advantages for each path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import stdev

from reward_kit.checks.tabular import Path

Formula = Callable[[Sequence[Path]], list[list[float]]]


def mean_of(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def last_turn(group: Sequence[Path]) -> int:
    return max(len(path.turns) for path in group)


def suffix_sums(rewards: Sequence[float]) -> list[float]:
    return [math.fsum(rewards[k:]) for k in range(len(rewards))]


# Right


def unit(values: Sequence[float]) -> list[float]:
    """Return values minus their mean, divided by the unbiased deviation; zeros if all are equal."""
    if len(set(values)) < 2:
        return [0.0] * len(values)
    return [(value - mean_of(values)) / stdev(values) for value in values]


def on_every_turn(group: Sequence[Path], values: Sequence[float]) -> list[list[float]]:
    return [[value] * len(path.turns) for path, value in zip(group, values, strict=True)]


def turn_by_turn(group: Sequence[Path], values: Sequence[float]) -> list[list[float]]:
    left = iter(values)
    return [[next(left) for _ in path.turns] for path in group]


def all_returns(group: Sequence[Path]) -> list[float]:
    return [value for path in group for value in path.returns]


def scores_by_deviation(group: Sequence[Path]) -> list[list[float]]:
    return on_every_turn(group, unit([path.score for path in group]))


def scores_by_deviation_of_turns(group: Sequence[Path]) -> list[list[float]]:
    return turn_by_turn(group, unit([path.score for path in group for _ in path.turns]))


def scores_less_mean_by_length(group: Sequence[Path]) -> list[list[float]]:
    mean = mean_of([path.score for path in group for _ in path.turns])
    return on_every_turn(group, [path.score - mean for path in group])


def returns_by_deviation(group: Sequence[Path]) -> list[list[float]]:
    return turn_by_turn(group, unit(all_returns(group)))


def returns_less_mean(group: Sequence[Path]) -> list[list[float]]:
    return turn_by_turn(group, less_the_mean(all_returns(group)))


def returns_by_state(
    group: Sequence[Path], measure: Callable[[Sequence[float]], list[float]] = unit
) -> list[list[float]]:
    """Normalize each return among those of the group's visits to the same state."""
    visits = [(turn.state, value) for path in group for turn, value in zip(path.turns, path.returns, strict=True)]
    peers = {state: iter(measure([value for s, value in visits if s == state])) for state, _ in visits}
    return turn_by_turn(group, [next(peers[state]) for state, _ in visits])


def returns_by_context(
    group: Sequence[Path], measure: Callable[[Sequence[float]], list[float]] = unit, history: int = 2
) -> list[list[float]]:
    """Average over contexts of 1 to `history` + 1 states, weighted 1, 2, …, the measures of returns that have peers."""
    parts: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for level in range(history + 1):
        visits: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for i, path in enumerate(group):
            for k in range(level, len(path.turns)):
                context = tuple(turn.state for turn in path.turns[k - level : k + 1])
                visits.setdefault(context, []).append((i, k))
        for places in visits.values():
            values = measure([group[i].returns[k] for i, k in places])
            for place, value in zip(places, values, strict=True):
                parts.setdefault(place, []).extend([(level + 1, value)] if len(places) > 1 else [])
    means = {
        place: sum(weight * value for weight, value in levels) / max(sum(weight for weight, _ in levels), 1)
        for place, levels in parts.items()
    }
    return [[means[i, k] for k in range(len(path.turns))] for i, path in enumerate(group)]


def values_by_state(group: Sequence[Path]) -> dict[str | None, float]:
    """Return the mean return of the group's visits to each state, and 0 for the end."""
    returns: dict[str | None, list[float]] = {}
    for path in group:
        for turn, value in zip(path.turns, path.returns, strict=True):
            returns.setdefault(turn.state, []).append(value)
    return {None: 0.0, **{state: mean_of(values) for state, values in returns.items()}}


def next_states(path: Path) -> list[str | None]:
    return [*(turn.state for turn in path.turns[1:]), None]


def generalized_advantages(
    group: Sequence[Path], lam: float, measure: Callable[[Sequence[float]], list[float]] = unit
) -> list[list[float]]:
    """Sum the temporal differences of the group's values, and normalize over all turns of the group."""
    values, advantages = values_by_state(group), []
    for path in group:
        deltas = [
            t.reward + values[after] - values[t.state] for t, after in zip(path.turns, next_states(path), strict=True)
        ]
        advantages += [sum(lam**i * delta for i, delta in enumerate(deltas[k:])) for k in range(len(deltas))]
    return turn_by_turn(group, measure(advantages))


def group_graph(group: Sequence[Path], measure: Callable[[Sequence[float]], list[float]] = unit) -> list[list[float]]:
    """Add the score, the value reached among actions in the same state, and the gain among all turns of the group."""
    values = values_by_state(group)
    visits = [
        (t.state, t.reward + values[after]) for p in group for t, after in zip(p.turns, next_states(p), strict=True)
    ]
    peers = {state: iter(measure([value for s, value in visits if s == state])) for state, _ in visits}
    gains = measure([value - values[state] for state, value in visits])
    steps = turn_by_turn(group, [next(peers[state]) + gain for (state, _), gain in zip(visits, gains, strict=True)])
    scores = measure([path.score for path in group])
    return [[score + value for value in row] for score, row in zip(scores, steps, strict=True)]


def steps_to_success(group: Sequence[Path], success_score: float) -> dict[str, float]:
    """Return the smallest number of turns from each state to a success, or one more than any if there is none."""
    edges = [
        (turn.state, after or ("success" if path.score >= success_score else "unknown"))
        for path in group
        for turn, after in zip(path.turns, next_states(path), strict=True)
    ]
    distances = {"success": 0.0, "unknown": math.inf} | {state: math.inf for state, _ in edges}
    for _ in edges:
        for state, after in edges:
            distances[state] = min(distances[state], distances[after] + 1.0)
    far = max(d for d in distances.values() if d < math.inf) + 1.0
    return {state: min(d, far) for state, d in distances.items()}


def graph_distances(group: Sequence[Path], success_score: float = 1.0) -> list[list[float]]:
    """Add the score and the closeness of the next state to success among actions in the same state."""
    distances = steps_to_success(group, success_score)
    visits = []
    for path in group:
        end = "success" if path.score >= success_score else "unknown"
        visits += [(t.state, 0.1 ** distances[s or end]) for t, s in zip(path.turns, next_states(path), strict=True)]
    peers = {state: iter(unit([value for s, value in visits if s == state])) for state, _ in visits}
    steps = turn_by_turn(group, [next(peers[state]) for state, _ in visits])
    return [[score + x for x in row] for score, row in zip(unit([p.score for p in group]), steps, strict=True)]


def less_the_mean(values: Sequence[float]) -> list[float]:
    return [value - mean_of(values) for value in values]


def less_the_others(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [0.0]
    return [value - mean_of([*values[:i], *values[i + 1 :]]) for i, value in enumerate(values)]


# The unit that a large group measures in


def deviation_of_scores(group: Sequence[Path]) -> float:
    return stdev([path.score for path in group])


def deviation_of_scores_by_length(group: Sequence[Path]) -> float:
    return stdev([path.score for path in group for _ in path.turns])


def deviation_of_returns(group: Sequence[Path]) -> float:
    return stdev(all_returns(group))


def one(_group: Sequence[Path]) -> float:
    return 1.0


# Wrong


def centred_by_turn(group: Sequence[Path]) -> list[list[float]]:
    """Center rewards among episodes that reached the turn, then sum to the own last turn (verl issue 7244)."""
    means = [mean_of([path.turns[k].reward for path in group if k < len(path.turns)]) for k in range(last_turn(group))]
    return [suffix_sums([turn.reward - mean for turn, mean in zip(path.turns, means, strict=False)]) for path in group]


def centred_by_turn_of_others(group: Sequence[Path]) -> list[list[float]]:
    """Center by the others' means; the number of terms still depends on the own last turn."""
    advantages = []
    for i, path in enumerate(group):
        others = [*group[:i], *group[i + 1 :]]
        means = [
            mean_of([other.turns[k].reward for other in others if k < len(other.turns)])
            for k in range(last_turn(group))
        ]
        advantages.append(suffix_sums([turn.reward - mean for turn, mean in zip(path.turns, means, strict=False)]))
    return advantages


def returns_less_mean_of_reached_turns(group: Sequence[Path]) -> list[list[float]]:
    """Return G_k minus its mean over episodes that reached turn k; rarely reached turns count less."""
    means = [mean_of([path.returns[k] for path in group if k < len(path.turns)]) for k in range(last_turn(group))]
    return [[value - mean for value, mean in zip(path.returns, means, strict=False)] for path in group]


def score_by_length(group: Sequence[Path]) -> list[list[float]]:
    """Divide the score among the turns."""
    return [[path.score / len(path.turns)] * len(path.turns) for path in group]


def returns_one_turn_late(group: Sequence[Path]) -> list[list[float]]:
    """Give each turn the return after it."""
    return [[*path.returns[1:], 0.0] for path in group]

"""Reference implementations of the estimators as loops over lists, as their formulas are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.credit.batches import ScoredBatch

Loop = Callable[..., list[list[float]]]


def rewards_of(given: ScoredBatch, b: int) -> list[float]:
    """Return r_k of one trajectory; missing rewards count -0.125, and the score comes last."""
    rewards = [item.base_reward for item in given.batch[b]]
    filled = [-0.125 if reward is None else reward for reward in rewards]
    if None in rewards:
        filled[-1] += given.scores[b]
    return filled


def returns_of(given: ScoredBatch, b: int, gamma: float = 0.5) -> list[float]:
    rewards = rewards_of(given, b)
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def scored(given: ScoredBatch, b: int | None = None) -> list[int]:
    """Return the scored trajectories, or only those of `b`'s group."""
    every = [c for c in range(len(given.batch)) if given.scores[c] is not None]
    return every if b is None else [c for c in every if given.ids[c] == given.ids[b]]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum((x - mean(values)) ** 2 for x in values) / max(len(values) - 1, 1))


def relative(x: float, among: Sequence[float], normalization: str) -> float:
    if normalization == "std":
        return (x - mean(among)) / (deviation(among) + 1e-6)
    if normalization == "leave_one_out":
        return x - (math.fsum(among) - x) / (len(among) - 1) if len(among) > 1 else 0.0
    return (x - mean(among)) / (4.0 if normalization == "constant" else 1.0)


def per_step(given: ScoredBatch, values: Callable[[int], float]) -> list[list[float]]:
    return [[values(b)] * len(given.batch[b]) if given.scores[b] is not None else [] for b in range(len(given.batch))]


def grpo(given: ScoredBatch, normalization: str = "std", **_: object) -> list[list[float]]:
    return per_step(
        given, lambda b: relative(given.scores[b], [given.scores[c] for c in scored(given, b)], normalization)
    )


def rloo(given: ScoredBatch) -> list[list[float]]:
    return grpo(given, "leave_one_out")


def reinforce_plus_plus_baseline(given: ScoredBatch) -> list[list[float]]:
    centred = {b: given.scores[b] - mean([given.scores[c] for c in scored(given, b)]) for b in scored(given)}
    return per_step(given, lambda b: relative(centred[b], list(centred.values()), "std"))


def opo(given: ScoredBatch, length: str = "recorded") -> list[list[float]]:
    def size(b: int) -> int:
        steps = given.batch[b]
        return len(steps) if length == "steps" else sum(len(item.policy_logprobs["token_ids"]) for item in steps)

    def baseline(b: int) -> float:
        group = scored(given, b)
        return math.fsum(size(c) * given.scores[c] for c in group) / sum(map(size, group))

    return per_step(given, lambda b: given.scores[b] - baseline(b))


def grpo_passk(given: ScoredBatch) -> list[list[float]]:
    def gain(b: int) -> float:
        others = [given.scores[c] for c in scored(given, b) if c != b]
        return max(given.scores[b] - max(others), 0.0) if others else 0.0

    return per_step(given, gain)


def gpg(given: ScoredBatch) -> list[list[float]]:
    telling = [b for b in scored(given) if len({given.scores[c] for c in scored(given, b)}) > 1]
    factor = len(scored(given)) / len(telling) if telling else 1.0
    return per_step(given, lambda b: factor * (given.scores[b] - mean([given.scores[c] for c in scored(given, b)])))


def discounted_returns(given: ScoredBatch, baseline: str = "none") -> list[list[float]]:
    rows = []
    for b in range(len(given.batch)):
        group = [x for c in scored(given, b) for x in returns_of(given, c)]
        taken = mean(group) if baseline == "mean" and group else 0.0
        rows.append([x - taken for x in returns_of(given, b)] if given.scores[b] is not None else [])
    return rows


def reinforce_plus_plus(given: ScoredBatch) -> list[list[float]]:
    every = [x for b in scored(given) for x in returns_of(given, b)]
    kept = range(len(given.batch))
    return [
        [relative(x, every, "std") for x in returns_of(given, b)] if given.scores[b] is not None else [] for b in kept
    ]


def gae(given: ScoredBatch, lam: float = 0.25) -> list[list[float]]:
    rows: list[list[float]] = []
    for b, steps in enumerate(given.batch):
        rows.append([])
        if given.scores[b] is None:
            continue
        rewards, values = rewards_of(given, b), [item.policy_value_estimate for item in steps]
        values.append(values[-1] if steps[-1].step_info.get("truncated") else 0.0)
        deltas = [rewards[k] + 0.5 * values[k + 1] - values[k] for k in range(len(steps))]
        for k in range(len(steps)):
            rows[-1].append(sum((0.5 * lam) ** (j - k) * deltas[j] for j in range(k, len(steps))))
    return rows


def turn_level_grpo(given: ScoredBatch) -> list[list[float]]:
    rows: list[list[float]] = []
    for b in range(len(given.batch)):
        others = [returns_of(given, c) for c in scored(given, b) if c != b]
        rows.append([])
        for k, own in enumerate(returns_of(given, b) if given.scores[b] is not None else []):
            at_k = [row[k] if k < len(row) else 0.0 for row in others]
            rows[-1].append(own - mean(at_k) if at_k else 0.0)
    return rows


def gigpo_episode(
    given: ScoredBatch, normalization: str, *, by_step: bool, penalty: Callable[[int], float] = lambda b: 0.0
) -> Callable[[int], float]:
    def score(c: int) -> float:
        return given.scores[c] - penalty(c)

    def episode(b: int) -> float:
        copies = {c: len(given.batch[c]) if by_step else 1 for c in scored(given, b)}
        among = [score(c) for c, n in copies.items() for _ in range(n)]
        if normalization == "leave_one_out":
            others = [score(c) for c, n in copies.items() if c != b for _ in range(n)]
            return score(b) - mean(others) if others else 0.0
        return relative(score(b), among, normalization)

    return episode


def gigpo(given: ScoredBatch, normalization: str = "std", **options: object) -> list[list[float]]:
    """A = 0.25 A_E + 0.75 A_S; `least`, `by_step` and `penalty` are the options of the same meaning."""
    least, penalty = int(options.get("least", 2)), float(options.get("penalty", 0.0))

    def penalties(b: int) -> list[float]:
        return [penalty if item.step_info.get("is_action_valid") is False else 0.0 for item in given.batch[b]]

    def returns(b: int) -> list[float]:
        rewards = [r - p for r, p in zip(rewards_of(given, b), penalties(b), strict=True)]
        return [sum(0.5 ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]

    episode = gigpo_episode(
        given, normalization, by_step=bool(options.get("by_step")), penalty=lambda b: sum(penalties(b))
    )

    def peers(b: int, state: object) -> list[float]:
        found = []
        for c in scored(given, b):
            found += [x for item, x in zip(given.batch[c], returns(c), strict=True) if item.observation_data == state]
        return found

    rows: list[list[float]] = []
    for b, steps in enumerate(given.batch):
        rows.append([])
        if given.scores[b] is None:
            continue
        for item, x in zip(steps, returns(b), strict=True):
            among = peers(b, item.observation_data)
            own = relative(x, among, normalization) if len(among) >= least else 0.0
            rows[-1].append(0.25 * episode(b) + 0.75 * own)
    return rows


def hgpo(given: ScoredBatch, history: int = 2, alpha: float = 1.0, normalization: str = "std") -> list[list[float]]:
    def context(b: int, k: int, level: int) -> list[object] | None:
        return [item.observation_data for item in given.batch[b][k - level : k + 1]] if k >= level else None

    rows: list[list[float]] = []
    for b, steps in enumerate(given.batch):
        rows.append([])
        for k in range(len(steps)) if given.scores[b] is not None else ():
            parts = []
            for level in range(min(history, k) + 1):
                among = [
                    x
                    for c in scored(given, b)
                    for j, x in enumerate(returns_of(given, c))
                    if context(c, j, level) == context(b, k, level)
                ]
                if len(among) > 1:
                    parts.append(((level + 1) ** alpha, relative(returns_of(given, b)[k], among, normalization)))
            total = sum(weight for weight, _ in parts)
            rows[-1].append(sum(weight * x for weight, x in parts) / total if parts else 0.0)
    return rows


def values_of(given: ScoredBatch, b: int) -> list[float]:
    """Return the mean return of the group in the state of each step, and 0 for the end."""
    values = []
    for item in given.batch[b]:
        values.append(
            mean(
                [
                    x
                    for c in scored(given, b)
                    for other, x in zip(given.batch[c], returns_of(given, c), strict=True)
                    if other.observation_data == item.observation_data
                ]
            )
        )
    return [*values, 0.0]


def gagpo(given: ScoredBatch, lam: float = 0.25, normalization: str = "std") -> list[list[float]]:
    def plain(b: int) -> list[float]:
        rewards, values = rewards_of(given, b), values_of(given, b)
        deltas = [r + 0.5 * values[k + 1] - values[k] for k, r in enumerate(rewards)]
        return [sum((0.5 * lam) ** (j - k) * deltas[j] for j in range(k, len(deltas))) for k in range(len(deltas))]

    advantages = {b: plain(b) for b in scored(given)}
    return [
        [relative(x, [y for c in scored(given, b) for y in advantages[c]], normalization) for x in advantages[b]]
        if b in advantages
        else []
        for b in range(len(given.batch))
    ]


def g2po(given: ScoredBatch, normalization: str = "std", **options: object) -> list[list[float]]:
    """A = A_E + 0.75 A_S."""
    reached = {
        b: [r + 0.5 * value for r, value in zip(rewards_of(given, b), values_of(given, b)[1:], strict=True)]
        for b in scored(given)
    }
    gains = {b: [q - 0.5 * v for q, v in zip(reached[b], values_of(given, b), strict=False)] for b in reached}
    episode = gigpo_episode(given, normalization, by_step=bool(options.get("by_step")))
    rows: list[list[float]] = []
    for b, steps in enumerate(given.batch):
        rows.append([])
        for k, item in enumerate(steps) if b in reached else ():
            peers = [
                q
                for c in scored(given, b)
                for other, q in zip(given.batch[c], reached[c], strict=True)
                if other.observation_data == item.observation_data
            ]
            everywhere = [x for c in scored(given, b) for x in gains[c]]
            step = relative(reached[b][k], peers, normalization) + relative(gains[b][k], everywhere, normalization)
            rows[-1].append(episode(b) + 0.75 * step)
    return rows


def graphgpo(given: ScoredBatch, normalization: str = "std", success: float = 1.0) -> list[list[float]]:
    """A = A_E + 0.75 A_S."""

    def transitions(b: int) -> list[tuple[object, object]]:
        states = [item.observation_data for item in given.batch[b]]
        return list(zip(states, [*states[1:], "success" if given.scores[b] >= success else "unknown"], strict=True))

    def reached(b: int) -> dict[object, float]:
        """Return 0.125 to the power of the distance of each state from success."""
        edges = [edge for c in scored(given, b) for edge in transitions(c)]
        distances = {state: math.inf for edge in edges for state in edge} | {"success": 0.0}
        for _ in edges:
            for state, after in edges:
                distances[state] = min(distances[state], distances[after] + 1.0)
        far = max(d for d in distances.values() if d < math.inf) + 1.0
        return {state: 0.125 ** (d if d < math.inf else far) for state, d in distances.items()}

    episode = gigpo_episode(given, normalization, by_step=False)
    rows: list[list[float]] = []
    for b in range(len(given.batch)):
        rows.append([])
        if given.scores[b] is None:
            continue
        values = reached(b)
        for state, after in transitions(b):
            peers = [values[t] for c in scored(given, b) for s, t in transitions(c) if s == state]
            rows[-1].append(episode(b) + 0.75 * relative(values[after], peers, normalization))
    return rows

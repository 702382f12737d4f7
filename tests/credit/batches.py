"""Builders of steps, and Hypothesis strategies with exactly representable numbers, for the tests of credit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from reward_kit.agent.models import StepData

Trajectory = list[StepData]


class ScoredBatch(NamedTuple):
    """A batch with its scores and groups."""

    batch: list[Trajectory]
    scores: list[float | None]
    ids: list[int]

    def of(self, order: Sequence[int]) -> ScoredBatch:
        """Return these trajectories in this order."""
        return ScoredBatch(
            [self.batch[b] for b in order], [self.scores[b] for b in order], [self.ids[b] for b in order]
        )

    def positions(self, order: Sequence[int]) -> list[int]:
        """Return the indices of these trajectories' steps in the flat arrays."""
        starts = [sum(map(len, self.batch[:b])) for b in range(len(self.batch))]
        return [starts[b] + k for b in order for k in range(len(self.batch[b]))]

    def with_scores(self, scores: Sequence[float | None]) -> ScoredBatch:
        return ScoredBatch(self.batch, list(scores), self.ids)


def step(state: object = "s", reward: float | None = 0.0, *, value: float | None = None, **info: object) -> StepData:
    return StepData(
        system_step_index=0,
        observation_data=state,
        action_taken={"type": "text", "content": ""},
        base_reward=reward,
        policy_value_estimate=value,
        step_info=info,
    )


def trajectory(states: str, rewards: Sequence[float | None]) -> Trajectory:
    return [step(state, reward) for state, reward in zip(states, rewards, strict=True)]


def with_tokens(item: StepData, tokens: int | None) -> StepData:
    logprobs = None if tokens is None else {"token_ids": [0] * tokens}
    return item.model_copy(update={"policy_logprobs": logprobs})


# Numbers with few digits, so that equal values are equal and differences are not noise.

eighths = st.integers(-20, 20).map(lambda n: n / 8)
# Every step has a value and sampled tokens, so that each estimator can read what it needs.
steps = st.builds(
    lambda state, reward, value, tokens, valid: with_tokens(
        step(state, reward, value=value, is_action_valid=valid), tokens
    ),
    st.sampled_from("abc"),
    st.one_of(eighths, eighths, eighths, st.none()),
    eighths,
    st.integers(1, 9),
    st.booleans(),
)
endings = st.sampled_from([{}, {"terminated": True}, {"terminated": False, "truncated": True}, {"truncated": True}])
trajectories = st.lists(steps, min_size=1, max_size=4)
scores_or_none = st.one_of(eighths, eighths, eighths, st.none())


@st.composite
def batches(draw: st.DrawFn, *, scores: st.SearchStrategy[float | None] = scores_or_none) -> ScoredBatch:
    """Return up to seven trajectories in up to three groups; some unscored, some truncated."""
    rows = draw(st.lists(st.tuples(trajectories, scores, st.integers(0, 2), endings), min_size=1, max_size=7))
    for row, _, _, ending in rows:
        row[-1].step_info.update(ending)
    return ScoredBatch([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])

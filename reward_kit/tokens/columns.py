"""`Columns`: the rows of many episodes as flat columns, on which connectors work without loops over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reward_kit.agent.models import StepData
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Columns:
    """The rows of a batch of episodes before they are laid out: E episodes of S steps, B rows of N tokens in all.

    A connector takes one and returns another (`with_columns`, `with_rows`, `select_rows`) and changes no array or
    episode.

    Attributes:
        episodes: collected ones.
        step_data: for each episode its steps, if they were given.
        scores_E: the score of each episode, NaN if it is unscored.
        step_starts_E: the beginning of each episode's steps on the axis of `steps`, and S at the end.
        steps: (S,) columns, one episode after another.
        tokens: (N,) columns, one row after another. `step` is the token's index on the axis of `steps`, -1 off actions.
        rows: (B,) columns, which become the batch's `non_tensor_batch`.
        lengths_B: tokens of each row.
        prompt_lengths_B: tokens of each row before the completion.
        episodes_B: the index in `episodes` of each row's episode.
    """

    episodes: Sequence[SingleAgentEpisode]
    step_data: Sequence[Sequence[StepData]] | None
    scores_E: Floats
    step_starts_E: Ints
    steps: Mapping[str, Array] = field(default_factory=dict)
    tokens: Mapping[str, Array] = field(default_factory=dict)
    rows: Mapping[str, Array] = field(default_factory=dict)
    lengths_B: Ints = field(default_factory=lambda: _NO_ROWS)
    prompt_lengths_B: Ints = field(default_factory=lambda: _NO_ROWS)
    episodes_B: Ints = field(default_factory=lambda: _NO_ROWS)

    @classmethod
    def from_episodes(
        cls,
        episodes: Sequence[SingleAgentEpisode],
        step_data: Sequence[Sequence[StepData]] | None = None,
        scores: Sequence[float | None] | None = None,
    ) -> Columns:
        """Return the columns that a pipeline begins with, without rows.

        Raises:
            ConfigError: there are not as many step lists or scores as episodes, or these are not episodes.
        """
        if not all(isinstance(episode, SingleAgentEpisode) for episode in episodes):
            raise ConfigError("episodes: expected episodes, such as group.episodes of run_group; got lists of steps")
        for given, what in ((step_data, "step lists"), (scores, "scores")):
            if given is not None and len(given) != len(episodes):
                raise ConfigError(f"{len(episodes)} episodes need {len(episodes)} {what}; got {len(given)}")
        counts = [len(episode) for episode in episodes] if step_data is None else [len(steps) for steps in step_data]
        # float64 turns None into NaN.
        scores_E = np.array([None] * len(episodes) if scores is None else list(scores), dtype=np.float64)
        return cls(list(episodes), step_data, scores_E, np.cumsum([0, *counts], dtype=np.int64))

    @property
    def starts_B(self) -> Ints:
        """The beginning of each row on the axis of `tokens`."""
        return np.cumsum(self.lengths_B) - self.lengths_B

    def with_columns(
        self,
        *,
        steps: Mapping[str, Array] | None = None,
        tokens: Mapping[str, Array] | None = None,
        rows: Mapping[str, Array] | None = None,
    ) -> Columns:
        """Add columns, or replace those of the same name; one that is not as long as its axis is a ConfigError."""
        sizes = {"steps": int(self.step_starts_E[-1]), "tokens": int(self.lengths_B.sum()), "rows": len(self.lengths_B)}
        for axis, given in (("steps", steps), ("tokens", tokens), ("rows", rows)):
            for key, values in (given or {}).items():
                if np.shape(values) != (sizes[axis],):
                    shape = np.shape(values)
                    raise ConfigError(f"{axis} column {key!r} has the shape {shape}; there are {sizes[axis]} {axis}")
        return replace(
            self,
            steps={**self.steps, **(steps or {})},
            tokens={**self.tokens, **(tokens or {})},
            rows={**self.rows, **(rows or {})},
        )

    def with_rows(self, lengths_B: Ints, prompt_lengths_B: Ints, episodes_B: Ints) -> Columns:
        """Replace the rows by these, which have no columns yet."""
        return replace(
            self, tokens={}, rows={}, lengths_B=lengths_B, prompt_lengths_B=prompt_lengths_B, episodes_B=episodes_B
        )

    def select_rows(self, rows: Sequence[int] | Array) -> Columns:
        """Return only these rows, given as indices in order or as a boolean mask over all rows."""
        chosen = np.asarray(rows)
        chosen = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen.astype(np.int64)
        lengths = self.lengths_B[chosen]
        positions = ranges(self.starts_B[chosen], lengths)
        return replace(
            self,
            tokens={key: values[positions] for key, values in self.tokens.items()},
            rows={key: values[chosen] for key, values in self.rows.items()},
            lengths_B=lengths,
            prompt_lengths_B=self.prompt_lengths_B[chosen],
            episodes_B=self.episodes_B[chosen],
        )


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return `start … start + length - 1` of each pair, one after another."""
    ends = np.cumsum(lengths)
    indices: Ints = np.repeat(starts - (ends - lengths), lengths)
    indices += np.arange(len(indices))
    return indices


def row_positions(lengths: Ints) -> npt.NDArray[np.int32]:
    """Return 0, 1, 2, … of each length, one after another."""
    indices = np.arange(int(lengths.sum()), dtype=np.int32)
    indices -= np.repeat((np.cumsum(lengths) - lengths).astype(np.int32), lengths)
    return indices

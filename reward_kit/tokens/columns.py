"""`Columns`, the rows of many episodes as flat columns, which connectors process without loops over tokens."""

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
    """The rows of a batch of episodes before they are padded or packed: E episodes, S steps, B rows, N tokens.

    A connector receives a `Columns` and returns a new one (`with_columns`, `with_rows`, `select_rows`); it does not
    modify any array or episode.

    Attributes:
        episodes: the collected episodes.
        step_data: the steps of each episode, or None if not passed.
        scores_E: the score of each episode, NaN if unscored.
        step_starts_E: the position of each episode's first step on the axis of `steps`, followed by S.
        steps: (S,) columns, one episode after another.
        tokens: (N,) columns, one row after another. `step` is the index of the token's step in `steps`, -1 if the
            policy did not sample the token.
        rows: (B,) columns, which become the `non_tensor_batch` of the batch.
        lengths_B: the number of tokens in each row.
        prompt_lengths_B: the number of tokens in each row before the completion.
        episodes_B: the index of each row's episode in `episodes`.
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
        """Return the columns with which a pipeline begins, without rows.

        Raises:
            ConfigError: the number of step lists or scores differs from the number of episodes, or `episodes` contains
                other items.
        """
        if not all(isinstance(episode, SingleAgentEpisode) for episode in episodes):
            raise ConfigError("episodes must be episodes, such as group.episodes of run_group, got lists of steps")
        for given, what in ((step_data, "step lists"), (scores, "scores")):
            if given is not None and len(given) != len(episodes):
                raise ConfigError(f"{len(episodes)} episodes require {len(episodes)} {what}, got {len(given)}")
        counts = [len(episode) for episode in episodes] if step_data is None else [len(steps) for steps in step_data]
        # float64 converts None to NaN.
        scores_E = np.array([None] * len(episodes) if scores is None else list(scores), dtype=np.float64)
        return cls(list(episodes), step_data, scores_E, np.cumsum([0, *counts], dtype=np.int64))

    @property
    def starts_B(self) -> Ints:
        """The start of each row on the axis of `tokens`."""
        return np.cumsum(self.lengths_B) - self.lengths_B

    def with_columns(
        self,
        *,
        steps: Mapping[str, Array] | None = None,
        tokens: Mapping[str, Array] | None = None,
        rows: Mapping[str, Array] | None = None,
    ) -> Columns:
        """Add or replace columns; raise a ConfigError if a column is not as long as its axis."""
        sizes = {"steps": int(self.step_starts_E[-1]), "tokens": int(self.lengths_B.sum()), "rows": len(self.lengths_B)}
        for axis, given in (("steps", steps), ("tokens", tokens), ("rows", rows)):
            for key, values in (given or {}).items():
                if np.shape(values) != (sizes[axis],):
                    shape = np.shape(values)
                    raise ConfigError(
                        f"{axis} column {key!r} has the shape {shape}, but there are {sizes[axis]} {axis}"
                    )
        return replace(
            self,
            steps={**self.steps, **(steps or {})},
            tokens={**self.tokens, **(tokens or {})},
            rows={**self.rows, **(rows or {})},
        )

    def with_rows(self, lengths_B: Ints, prompt_lengths_B: Ints, episodes_B: Ints) -> Columns:
        """Replace the rows with new ones, which have no columns yet."""
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
    """Return the concatenated ranges `start … start + length - 1`."""
    ends = np.cumsum(lengths)
    indices: Ints = np.repeat(starts - (ends - lengths), lengths)
    indices += np.arange(len(indices))
    return indices


def row_positions(lengths: Ints) -> npt.NDArray[np.int32]:
    """Return the concatenated ranges `0 … length - 1`."""
    indices = np.arange(int(lengths.sum()), dtype=np.int32)
    indices -= np.repeat((np.cumsum(lengths) - lengths).astype(np.int32), lengths)
    return indices

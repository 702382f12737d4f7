"""The rows of multiple episodes as flat columns, which connectors can process without loops over tokens."""

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
    """The rows of a batch of episodes before padding or packing: E episodes, S steps, B rows, N tokens.

    A connector receives a `Columns` and returns a new one (see `with_columns`, `with_rows` and `select_rows`). It does
    not modify any array or episode.

    Attributes:
        episodes: the collected episodes.
        step_data: the steps of each episode, or None if they were not passed.
        scores_E: the score of each episode, or NaN if it is unscored.
        step_starts_E: the index in `steps` at which each episode begins, followed by S.
        steps: columns of shape (S,), in which the steps of all episodes are concatenated.
        tokens: columns of shape (N,), in which the tokens of all rows are concatenated. The column `step` contains the
            index in `steps` of each token's step, or -1 if the policy did not sample the token.
        rows: columns of shape (B,), which become the `non_tensor_batch` of the batch.
        lengths_B: the number of tokens in each row.
        prompt_lengths_B: the number of tokens before the completion in each row.
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
        """Return the initial columns of a pipeline, which have no rows yet.

        Raises:
            ConfigError: If the number of step lists or scores differs from the number of episodes, or `episodes`
                contains an object that is not an episode.
        """
        if not all(isinstance(episode, SingleAgentEpisode) for episode in episodes):
            raise ConfigError(
                "episodes must be a list of episodes, such as the episodes of the group that run_group returns"
            )
        for items, name in ((step_data, "step lists"), (scores, "scores")):
            if items is not None and len(items) != len(episodes):
                raise ConfigError(f"{len(episodes)} episodes require {len(episodes)} {name}, got {len(items)}")
        counts = [len(episode) for episode in episodes] if step_data is None else [len(steps) for steps in step_data]
        # float64 converts None to NaN.
        scores_E = np.array([None] * len(episodes) if scores is None else list(scores), dtype=np.float64)
        return cls(list(episodes), step_data, scores_E, np.cumsum([0, *counts], dtype=np.int64))

    @property
    def starts_B(self) -> Ints:
        """The index in `tokens` at which each row begins."""
        return np.cumsum(self.lengths_B) - self.lengths_B

    def with_columns(
        self,
        *,
        steps: Mapping[str, Array] | None = None,
        tokens: Mapping[str, Array] | None = None,
        rows: Mapping[str, Array] | None = None,
    ) -> Columns:
        """Return a copy with columns added or replaced.

        Raises:
            ConfigError: If a column has the wrong length.
        """
        sizes = {"steps": int(self.step_starts_E[-1]), "tokens": int(self.lengths_B.sum()), "rows": len(self.lengths_B)}
        for axis, added in (("steps", steps), ("tokens", tokens), ("rows", rows)):
            for key, values in (added or {}).items():
                if np.shape(values) != (sizes[axis],):
                    shape = np.shape(values)
                    raise ConfigError(f"the {axis} column {key!r} must have the shape ({sizes[axis]},), got {shape}")
        return replace(
            self,
            steps={**self.steps, **(steps or {})},
            tokens={**self.tokens, **(tokens or {})},
            rows={**self.rows, **(rows or {})},
        )

    def with_rows(self, lengths_B: Ints, prompt_lengths_B: Ints, episodes_B: Ints) -> Columns:
        """Return a copy in which new rows, which have no columns yet, replace the current rows."""
        return replace(
            self, tokens={}, rows={}, lengths_B=lengths_B, prompt_lengths_B=prompt_lengths_B, episodes_B=episodes_B
        )

    def select_rows(self, rows: Sequence[int] | Array) -> Columns:
        """Return a copy that contains only the rows selected by a list of indices or a boolean mask."""
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
    """Return the concatenated ranges from each `start` to `start + length - 1`."""
    ends = np.cumsum(lengths)
    indices: Ints = np.repeat(starts - (ends - lengths), lengths)
    indices += np.arange(len(indices))
    return indices


def row_positions(lengths: Ints) -> npt.NDArray[np.int32]:
    """Return the concatenated ranges from 0 to each `length - 1`."""
    indices = np.arange(int(lengths.sum()), dtype=np.int32)
    indices -= np.repeat((np.cumsum(lengths) - lengths).astype(np.int32), lengths)
    return indices

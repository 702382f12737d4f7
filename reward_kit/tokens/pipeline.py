"""The conversion of episodes to training rows: `build_rows`, and pipelines of connectors that users can change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, get_args

from reward_kit.agent.models import StepData
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, TrainingError, boundary, did_you_mean
from reward_kit.tokens.batch import Padding, TokenBatch
from reward_kit.tokens.columns import Columns
from reward_kit.tokens.connectors import (
    action_rows,
    credit_on_tokens,
    episode_facts,
    identities,
    segment_rows,
    step_values,
)
from reward_kit.tokens.layout import pad_rows

Connector = Callable[[Columns], Columns]
"""A step of a pipeline: a function from `Columns` to `Columns`."""
RowPer = Literal["segment", "action"]


class RowPipeline:
    """A sequence of connectors, each with a unique name.

    The default name of a connector is the `__name__` of a function, the `name` of an object, or else the name of its
    class. A repeated or unknown name raises a ConfigError.
    """

    def __init__(self, connectors: Iterable[Connector] = ()) -> None:
        self._parts: list[tuple[str, Connector]] = []
        for connector in connectors:
            self.append(connector)

    @property
    def names(self) -> list[str]:
        """The names in the order of execution."""
        return [name for name, _ in self._parts]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Connector]:
        return iter([connector for _, connector in self._parts])

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def append(self, connector: Connector, name: str | None = None) -> None:
        """Add a connector at the end."""
        self._insert(len(self._parts), connector, name)

    def insert_before(self, target: str, connector: Connector, name: str | None = None) -> None:
        """Insert a connector before the one named `target`."""
        self._insert(self._find(target), connector, name)

    def insert_after(self, target: str, connector: Connector, name: str | None = None) -> None:
        """Insert a connector after the one named `target`."""
        self._insert(self._find(target) + 1, connector, name)

    def remove(self, name: str) -> Connector:
        """Remove and return the connector with this name."""
        return self._parts.pop(self._find(name))[1]

    def __call__(self, columns: Columns) -> Columns:
        """Run all connectors.

        Raises:
            TrainingError: a connector raised another exception.
            ConfigError: a connector did not return columns.
        """
        for name, connector in self._parts:
            with boundary(TrainingError, f"connector {name!r}"):
                result: object = connector(columns)
            if not isinstance(result, Columns):
                kind = type(result).__name__
                raise ConfigError(
                    f"connector {name!r} returned {kind}; return columns.with_columns(…) or columns.select_rows(…)"
                )
            columns = result
        return columns

    def _insert(self, position: int, connector: Connector, name: str | None) -> None:
        candidates = (getattr(connector, attribute, None) for attribute in ("name", "__name__"))
        name = name or next(
            (candidate for candidate in candidates if isinstance(candidate, str)), type(connector).__name__
        )
        if name in self.names:
            raise ConfigError(f"a connector named {name!r} already exists; pass another name=")
        self._parts.insert(position, (name, connector))

    def _find(self, name: str) -> int:
        if name not in self.names:
            raise ConfigError(f"unknown connector {name!r}{did_you_mean(name, self.names)}")
        return self.names.index(name)


def default_pipeline(per: RowPer = "segment") -> RowPipeline:
    """Return a new pipeline with the connectors of `build_rows`, with one row per segment or per action."""
    if per not in get_args(RowPer):
        raise ConfigError(f"per must be 'segment' or 'action', got {per!r}")
    rows = segment_rows if per == "segment" else action_rows
    return RowPipeline([rows, step_values, credit_on_tokens, identities, episode_facts])


def row_columns(
    episodes: Sequence[SingleAgentEpisode],
    step_data_lists: Sequence[Sequence[StepData]] | None = None,
    *,
    scores: Sequence[float | None] | None = None,
    per: RowPer | None = None,
    pipeline: RowPipeline | None = None,
) -> Columns:
    """Return the rows as columns for `pad_rows` and `pack_rows`; see `build_rows` for arguments and errors."""
    if per is not None and pipeline is not None:
        raise ConfigError("per and pipeline cannot be combined; pass pipeline=default_pipeline(per)")
    return (pipeline or default_pipeline(per or "segment"))(Columns.from_episodes(episodes, step_data_lists, scores))


def build_rows(
    episodes: Sequence[SingleAgentEpisode],
    step_data_lists: Sequence[Sequence[StepData]] | None = None,
    *,
    pad_token_id: int,
    scores: Sequence[float | None] | None = None,
    padding: Padding = "right",
    per: RowPer | None = None,
    pipeline: RowPipeline | None = None,
) -> TokenBatch:
    """Return padded rows in the order of the episodes; an episode without tokens has no row.

    Args:
        episodes: the collected episodes.
        step_data_lists: the steps of each episode with `advantage`, `return_to_go` and `base_reward`. The loss_mask of
            a step without an advantage is 0; None means that no step has an advantage.
        pad_token_id: the id used as padding.
        scores: the score of each episode, None if unscored.
        padding: "right", "left", or "outer" (see `tokens.layout.pad_rows`).
        per: "segment" for one row per segment, or "action" for one row per action, whose prompt is everything before
            it.
        pipeline: the connectors; by default `default_pipeline(per)`.

    Raises:
        ConfigError: the lists are not as long as `episodes`, an option is unknown, or both `per` and `pipeline` are
            passed.
        EpisodeError: an episode's tokens belong to a step that is not among its steps.
    """
    columns = row_columns(episodes, step_data_lists, scores=scores, per=per, pipeline=pipeline)
    return pad_rows(columns, pad_token_id=pad_token_id, padding=padding)

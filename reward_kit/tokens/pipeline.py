"""Conversion of episodes to training rows: `build_rows`, and modifiable pipelines of connectors."""

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

    The default name of a connector is its `name` attribute or, for a function, its `__name__`. An object with neither
    attribute is named after its class. Methods raise a ConfigError if a name is unknown or already taken.
    """

    def __init__(self, connectors: Iterable[Connector] = ()) -> None:
        self._parts: list[tuple[str, Connector]] = []
        for connector in connectors:
            self.append(connector)

    @property
    def names(self) -> list[str]:
        """The names of the connectors, in the order in which they run."""
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
        """Remove the connector with the given name, and return it."""
        return self._parts.pop(self._find(name))[1]

    def __call__(self, columns: Columns) -> Columns:
        """Run all connectors in order.

        Raises:
            TrainingError: If a connector raises an exception other than a `RewardKitError`.
            ConfigError: If a connector does not return a `Columns`.
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
            raise ConfigError(f"the pipeline already has a connector named {name!r}; pass a different name")
        self._parts.insert(position, (name, connector))

    def _find(self, name: str) -> int:
        if name not in self.names:
            raise ConfigError(f"unknown connector {name!r}{did_you_mean(name, self.names)}")
        return self.names.index(name)


def default_pipeline(per: RowPer = "segment") -> RowPipeline:
    """Return a new pipeline that contains the default connectors of `build_rows`.

    Args:
        per: "segment" for one row per segment, or "action" for one row per action.
    """
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
    """Return the rows as columns for `pad_rows` or `pack_rows`. See `build_rows` for the arguments and errors."""
    if per is not None and pipeline is not None:
        raise ConfigError(
            "per and pipeline cannot be used together; pass only one, such as pipeline=default_pipeline(per)"
        )
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
    """Convert episodes to padded rows, in the order of the episodes. An episode without tokens has no row.

    Args:
        episodes: the collected episodes.
        step_data_lists: the steps of each episode, with `advantage`, `return_to_go` and `base_reward` set. The
            `loss_mask` is 0 for a step without an advantage. If None, no step has an advantage.
        pad_token_id: the token id used as padding.
        scores: the score of each episode, or None for an unscored episode.
        padding: "right", "left", or "outer"; see `tokens.layout.pad_rows`.
        per: "segment" for one row per segment, or "action" for one row per action. The prompt of an action is
            everything before the action in its segment.
        pipeline: the connectors. If None, `default_pipeline(per)` is used.

    Raises:
        ConfigError: If the lists are not as long as `episodes`, an option is unknown, or both `per` and `pipeline` are
            passed.
        EpisodeError: If an episode has tokens for a step that is not among its steps.
    """
    columns = row_columns(episodes, step_data_lists, scores=scores, per=per, pipeline=pipeline)
    return pad_rows(columns, pad_token_id=pad_token_id, padding=padding)

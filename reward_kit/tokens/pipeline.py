"""The connectors between episodes and rows, in a list that users can change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, get_args

from reward_kit.errors import ConfigError, TrainingError, boundary, did_you_mean
from reward_kit.tokens.columns import Columns
from reward_kit.tokens.connectors import (
    action_rows,
    credit_on_tokens,
    episode_facts,
    identities,
    segment_rows,
    step_values,
)

Connector = Callable[[Columns], Columns]
"""A step of a pipeline: columns in, columns out."""
RowPer = Literal["segment", "action"]


class RowPipeline:
    """Connectors that run one after another, each known by a name.

    Args:
        connectors: what it begins with, each under its own name: a function's `__name__`, an object's `name` or else
            the name of its class.

    Raises:
        ConfigError: two have one name.
    """

    def __init__(self, connectors: Iterable[Connector] = ()) -> None:
        self._parts: list[tuple[str, Connector]] = []
        for connector in connectors:
            self.append(connector)

    @property
    def names(self) -> list[str]:
        """In the order in which they run."""
        return [name for name, _ in self._parts]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Connector]:
        return iter([connector for _, connector in self._parts])

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def append(self, connector: Connector, name: str | None = None) -> None:
        """Put one at the end.

        Args:
            connector: the connector.
            name: what it is called here; by default its own name.

        Raises:
            ConfigError: another has this name.
        """
        self._insert(len(self._parts), connector, name)

    def insert_before(self, place: str, connector: Connector, name: str | None = None) -> None:
        """Put one before the one called `place`.

        Raises:
            ConfigError: there is no `place`, or another has this name.
        """
        self._insert(self._find(place), connector, name)

    def insert_after(self, place: str, connector: Connector, name: str | None = None) -> None:
        """Put one behind the one called `place`.

        Raises:
            ConfigError: there is no `place`, or another has this name.
        """
        self._insert(self._find(place) + 1, connector, name)

    def remove(self, name: str) -> Connector:
        """Take out the one called so, and return it.

        Raises:
            ConfigError: there is none.
        """
        return self._parts.pop(self._find(name))[1]

    def __call__(self, columns: Columns) -> Columns:
        """Run all of them.

        Raises:
            TrainingError: a connector raised something of its own.
            ConfigError: a connector did not return columns.
        """
        for name, connector in self._parts:
            with boundary(TrainingError, f"connector {name!r}"):
                made: object = connector(columns)
            if not isinstance(made, Columns):
                kind = type(made).__name__
                raise ConfigError(f"connector {name!r} returned {kind}; return columns.adding(…) or columns.taking(…)")
            columns = made
        return columns

    def _insert(self, position: int, connector: Connector, name: str | None) -> None:
        known = name or _name_of(connector)
        if known in self.names:
            raise ConfigError(f"there is a connector {known!r} already; give this one a name of its own")
        self._parts.insert(position, (known, connector))

    def _find(self, name: str) -> int:
        if name not in self.names:
            raise ConfigError(f"there is no connector {name!r}{did_you_mean(name, self.names)}")
        return self.names.index(name)


def _name_of(connector: Connector) -> str:
    for attribute in ("name", "__name__"):
        if isinstance(found := getattr(connector, attribute, None), str):
            return found
    return type(connector).__name__


def default_pipeline(per: RowPer = "segment") -> RowPipeline:
    """A new pipeline of what `build_rows` does.

    Args:
        per: what becomes a row, a segment or an action.

    Raises:
        ConfigError: it is neither.
    """
    if per not in get_args(RowPer):
        raise ConfigError(f"rows are per 'segment' or per 'action'; got {per!r}")
    rows = segment_rows if per == "segment" else action_rows
    return RowPipeline([rows, step_values, credit_on_tokens, identities, episode_facts])

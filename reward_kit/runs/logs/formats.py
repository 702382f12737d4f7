"""The interface of a format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_kit.runs.logs.documents import Document
from reward_kit.runs.logs.records import FieldReport, LogEpisode, lost_fields


@dataclass(frozen=True, slots=True)
class LogHeader:
    """The header of a log: the task, the model, and all other keys. A format may have none."""

    task: str | None = None
    model: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


def no_header(path: Path) -> LogHeader:
    """Return the header of a log whose format has none."""
    return LogHeader()


@dataclass(frozen=True, slots=True)
class LogFormat:
    """A format of logs.

    Attributes:
        name: the value of `--format`.
        documents: yields the documents of a log.
        to_log: converts a document; the last argument is its location for messages.
        header: reads the header of a log.
        to_document: converts the lines of an episode and its score to a document; None for a format without export.
        lost_fields: yields the fields of these two lines that a document cannot store.
    """

    name: str
    documents: Callable[[Path], Iterator[Document]]
    to_log: Callable[[Document, LogHeader, FieldReport, str], LogEpisode]
    header: Callable[[Path], LogHeader] = no_header
    to_document: Callable[[Mapping[str, Any], Mapping[str, Any] | None], dict[str, Any]] | None = None
    lost_fields: Callable[[Mapping[str, Any], Mapping[str, Any] | None], Iterable[str]] = lost_fields

"""Read the samples of a task: the rows of its JSONL, CSV or YAML dataset, each with its file and line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_kit.agent.samples import Sample, parse_tags
from reward_kit.environments.harbor_task import find_task_folders
from reward_kit.errors import ConfigError, did_you_mean, type_name
from reward_kit.models import TaskDefinitionModel
from reward_kit.runs.task_file import LocatedYaml
from reward_kit.runs.task_folders import harbor_rows
from reward_kit.safe_input import NESTING, is_nested_too_deeply

_TOO_DEEP = f"a value is nested more than {NESTING} levels deep"


def read_samples(
    definition: TaskDefinitionModel, folder: Path, rows: Sequence[Mapping[str, Any]] | None = None
) -> Iterator[Sample]:
    """Yield the samples of a task in the order of the dataset. A task without a dataset has a single sample."""
    if rows is not None:
        placed: Iterable[tuple[str, dict[str, Any]]] = ((f"dataset[{i}]", dict(row)) for i, row in enumerate(rows))
    elif definition.dataset_path is not None:
        placed = read_rows(folder / definition.dataset_path)
    else:
        yield Sample.from_task(definition)
        return
    seen: dict[str, str] = {}
    for where, row in placed:
        config = row.get("resource_config") or {}
        if not isinstance(config, Mapping):
            raise ConfigError(f"{where}: resource_config is {type_name(config)}, not a mapping")
        truth = row.get("ground_truth", definition.ground_truth)
        check_tags(row.get("tags"), where)
        if definition.tags:
            row["tags"] = list(dict.fromkeys((*definition.tags, *parse_tags(row.get("tags")))))
        sample = Sample(str(row.get("id", f"sample-{len(seen)}")), row, truth, config, where)
        if sample.id in seen:
            raise ConfigError(f"{where}: sample id {sample.id!r} is already used at {seen[sample.id]}")
        seen[sample.id] = where
        yield sample
    if not seen and definition.dataset_path is not None:
        raise ConfigError(f"dataset {folder / definition.dataset_path} has no rows")


def check_tags(tags: Any, where: str) -> None:
    """Raise a ConfigError unless the `tags` of a row are `None`, a string, or a list of strings."""
    items = tags if isinstance(tags, list | tuple) else () if tags is None or isinstance(tags, str) else (tags,)
    for item in items:
        if not isinstance(item, str):
            raise ConfigError(f"{where}: tags must be a list of strings or a comma-separated string, got {item!r:.60}")


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a JSONL, CSV or YAML dataset, or of a folder of Harbor tasks, each with its `file:line`."""
    check_dataset(path)
    if path.is_dir():
        yield from harbor_rows(path)
        return
    try:
        for where, row in _READERS[path.suffix](path):
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: expected a mapping of fields, got {type_name(row)}")
            yield where, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"dataset {path} cannot be read as UTF-8 {path.suffix[1:]}: {error}") from None


def load_jsonl(file_path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file.

    Raises:
        ConfigError: the file does not exist, or a line is not a JSON object; the message contains the file and line.
    """
    return [row for _, row in read_rows(Path(file_path))]


def check_dataset(path: Path) -> None:
    """Check that a dataset exists and has a known format."""
    if path.is_dir() and find_task_folders(path):
        return
    if not path.is_file():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = did_you_mean(path.name, beside)
        raise ConfigError(f"dataset {path} does not exist{near if '?' in near else ''}")
    if path.suffix not in _READERS:
        raise ConfigError(f"dataset {path}: unknown format {path.suffix!r}; known: {', '.join(_READERS)}")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                problem = f"{error.msg}, at character {error.pos + 1}"
                raise ConfigError(f"{path}:{number}: not JSON: {problem}; write one object per line") from None
            except (
                ValueError,
                RecursionError,
            ) as error:  # a number with thousands of digits, or deeply nested brackets
                problem = _TOO_DEEP if isinstance(error, RecursionError) else str(error)[:80]
                raise ConfigError(f"{path}:{number}: {problem}") from None
            if is_nested_too_deeply(row):
                raise ConfigError(f"{path}:{number}: {_TOO_DEEP}")
            yield f"{path}:{number}", row


def _read_csv(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        names = rows.fieldnames or []
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"{path}:1: duplicate column {twice!r}")
        for row in rows:
            if None in row or None in row.values():
                raise ConfigError(f"{path}:{rows.line_num}: the row does not have the header's {len(names)} columns")
            yield f"{path}:{rows.line_num}", dict(row)


def _read_yaml(path: Path) -> Iterator[tuple[str, Any]]:
    located = LocatedYaml(path)
    if not isinstance(located.data, list):
        raise ConfigError(f"{path}: a YAML dataset must be a list of rows")
    for index, row in enumerate(located.data):
        yield located.where((index,)), row


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
}

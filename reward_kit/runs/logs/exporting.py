"""Export of runs as logs of other tools.

If an episode was imported in the same format, its fields without a place in an episode are restored from the run's copy
of the log.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.episodes.record import episode_to_record
from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.private_files import make_private_folder
from reward_kit.runs.export import STDOUT, binary_file
from reward_kit.runs.files import copied_log
from reward_kit.runs.logs import inspect_log
from reward_kit.runs.logs.documents import Document, LogArchive, find_document
from reward_kit.runs.logs.formats import LogFormat, LogHeader
from reward_kit.runs.logs.importing import FORMATS
from reward_kit.runs.logs.records import LOG, FieldReport, is_empty, is_same, restore, score_line, to_episode
from reward_kit.runs.results import Result
from reward_kit.runs.run_folder import RunHeader

EXPORTED = tuple(name for name, form in FORMATS.items() if form.to_document is not None)
"""The formats that a run can be exported to."""
_PLACED = frozenset(
    {
        *("schema_version", "rollout_id", "sample_id", "group_id", "rollout_index", "attempt", "policy", "stop_reason"),
        *("failure", "terminated", "truncated", "num_steps", "usage", "messages", "steps", "final", "sample", "timing"),
        *("ground_truth", "custom_data"),
    }
)


class ExportedLogs(NamedTuple):
    """The written files, the number of episodes, and the fields that the format has no place for."""

    paths: list[Path]
    episodes: int
    dropped: Counter[str]


class _Original(NamedTuple):
    """The imported document of an episode, and the same document after its conversion to an episode and back."""

    document: dict[str, Any]
    converted: dict[str, Any]


class _Originals:
    """The documents from which the episodes of a run were imported."""

    def __init__(self, run: Path, header: RunHeader, form: LogFormat, files: ExitStack) -> None:
        self._run, self._form, self._files = run, form, files
        listed = (header.imported or {}).get("files") or ()
        self.files = {one.get("copy"): one for one in listed if isinstance(one, Mapping)}
        self.headers: dict[str, LogHeader] = {}
        self._finders: dict[str, Callable[[str], Document | None]] = {}

    def copy_of(self, record: Mapping[str, Any]) -> str | None:
        """Return the copy of the log that contains an episode, or None if it was not imported in this format."""
        origin = (record.get("custom_data") or {}).get(LOG)
        if not isinstance(origin, Mapping) or origin.get("format") != self._form.name:
            return None
        copy = origin.get("copy")
        return copy if isinstance(copy, str) and copy in self.files else None

    def header(self, copy: str) -> LogHeader:
        """Return the header of the copy of a log."""
        if copy not in self.headers:
            path = copied_log(self._run, copy)
            is_inspect = self._form.name == inspect_log.NAME
            header = inspect_log.read_header(path, to_end=True) if is_inspect else LogHeader()
            facts = self.files.get(copy, {})
            data = {**header.data, **({"trial": facts["trial"]} if "trial" in facts else {})}
            self.headers[copy] = LogHeader(header.task, facts.get("model") or header.model, data)
            if zipfile.is_zipfile(path):
                archive = self._files.enter_context(LogArchive(path))
                names = set(archive.names)
                self._finders[copy] = lambda name: Document(name, archive.parse(name)) if name in names else None
            else:
                self._finders[copy] = find_document(lambda: self._form.documents(path))
        return self.headers[copy]

    def find(self, record: Mapping[str, Any]) -> _Original | None:
        """Return the original of an episode, or None if it was not imported in this format."""
        copy = self.copy_of(record)
        if copy is None:
            return None
        header, origin = self.header(copy), record["custom_data"][LOG]
        document = self._finders[copy](str(origin.get("where")))
        if document is None:
            raise StoreError(f"{self._run / copy}: has no {origin.get('where')!r:.100}; was the file edited?")
        where = f"{self._run / copy}: {document.where}"
        log = self._form.to_log(document, header, FieldReport(Counter(), Counter()), where)
        if record["sample_id"] == f"{header.task}/{log.sample_id}":
            log.sample_id = record["sample_id"]
        episode = to_episode(log, record["rollout_index"], {}, where)
        episode.custom_data[LOG] = {"format": self._form.name, "fields": log.extra}
        assert self._form.to_document is not None
        line = score_line(log, episode.id_, self._form.name, None)
        return _Original(document.data, self._form.to_document(episode_to_record(episode), line))


def to_document(form: LogFormat, originals: _Originals, result: Result) -> tuple[dict[str, Any], bool]:
    """Return the document of an episode, and whether it differs from the imported document."""
    assert form.to_document is not None
    current = form.to_document(result.episode, result.score)
    original = originals.find(result.episode)
    if original is None:
        return current, True
    restored = restore(original.document, original.converted, current)
    return restored, not is_same(restored, original.document)


def export_logs(
    run: Path, header: RunHeader, results: Iterable[Result], form: str, target: Path, *, is_private: bool
) -> ExportedLogs:
    """Write the episodes of a run as logs.

    Args:
        run: the run.
        header: its header.
        results: the selected episodes.
        form: one of `EXPORTED`.
        target: a directory, or the path of the only log.
        is_private: whether only the owner may read the files.

    Raises:
        ConfigError: the target is a file, but there are multiple logs.
        StoreError: an episode or the copy of a log cannot be read.
    """
    exported = ExportedLogs([], 0, Counter())
    with ExitStack() as files:
        originals = _Originals(run, header, FORMATS[form], files)
        write = _InspectLogs if form == inspect_log.NAME else _Trajectories
        logs = write(run, header, originals, target, is_private, files)
        for result in results:
            with boundary(StoreError, f"episodes.jsonl: {result.episode['rollout_id']} cannot be read as an episode"):
                _count_dropped(result.episode, exported.dropped)
                document, is_changed = to_document(FORMATS[form], originals, result)
            logs.add(result, document, is_changed)
            exported = exported._replace(episodes=exported.episodes + 1)
        logs.close()
    return exported._replace(paths=logs.paths)


def _count_dropped(record: Mapping[str, Any], dropped: Counter[str]) -> None:
    """Count the fields of an episode that the formats have no place for."""
    dropped.update(key for key, value in record.items() if key not in _PLACED and not is_empty(value))
    custom = record.get("custom_data") or {}
    dropped.update(f"custom_data.{key}" for key, value in custom.items() if key != LOG and not is_empty(value))
    is_rewarded = record.get("environment_return") is not None
    for step in record["steps"]:
        info = {key: value for key, value in (step.get("info") or {}).items() if not is_empty(value)}
        is_dropped = {
            "reward": is_rewarded and step.get("reward") is not None,
            "observation": not isinstance(step.get("observation"), str | None),
            "state_key": step.get("state_key") is not None,
            "info": bool(info),
            "outputs": bool(step.get("outputs")),
        }
        dropped.update(f"steps.{key}" for key, is_lost in is_dropped.items() if is_lost)


class _Logs:
    """The files of an export."""

    suffix = ".json"

    def __init__(
        self, run: Path, header: RunHeader, originals: _Originals, target: Path, is_private: bool, files: ExitStack
    ) -> None:
        self._run, self._header, self._originals, self._target = run, header, originals, target
        self._is_private, self._files = is_private, files
        self.paths: list[Path] = []
        self._is_file = target == STDOUT or target.suffix in (".json", ".eval")
        if not self._is_file and not target.is_dir():
            with boundary(ConfigError, f"-o {target}: cannot be created"):
                (make_private_folder if is_private else Path.mkdir)(target, parents=True)

    def path_for(self, name: str) -> Path:
        """Return the path of a new file."""
        if not self._is_file:
            slug = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:100] or "log"
            taken = {path.name for path in self.paths}
            number = next(n for n in range(len(taken) + 1) if f"{slug}{f'-{n}' if n else ''}{self.suffix}" not in taken)
            self.paths.append(self._target / f"{slug}{f'-{number}' if number else ''}{self.suffix}")
        elif self.paths:
            raise ConfigError(f"-o {self._target}: the run has more than one log; pass a directory, or select --policy")
        else:
            self.paths.append(self._target)
        return self.paths[-1]

    def add(self, result: Result, document: dict[str, Any], is_changed: bool) -> None:
        """Write a document."""
        raise NotImplementedError

    def close(self) -> None:
        """Complete the files."""


class _Trajectories(_Logs):
    """One JSON file for each episode."""

    def add(self, result: Result, document: dict[str, Any], is_changed: bool) -> None:
        """Write a document."""
        path = self.path_for(result.episode["rollout_id"])
        with binary_file(path, is_private=self._is_private) as file:
            file.write(json.dumps(document, indent=2).encode("ascii") + b"\n")


@dataclass
class _OpenLog:
    writer: inspect_log.InspectWriter
    header: dict[str, Any]
    sample_ids: dict[str, None] = field(default_factory=dict)
    epochs: int = 1
    is_changed: bool = False
    samples: int = 0


class _InspectLogs(_Logs):
    """One log of inspect for each imported log or, for other runs, for each policy."""

    suffix = ".eval"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._logs: dict[tuple[str | None, str], _OpenLog] = {}

    def add(self, result: Result, document: dict[str, Any], is_changed: bool) -> None:
        """Write a sample to the log of its policy."""
        record = result.episode
        key = self._originals.copy_of(record), str(record["policy"])
        if key not in self._logs:
            self._logs[key] = self._open(*key)
        log = self._logs[key]
        log.writer.add(document)
        log.sample_ids[str(document["id"])] = None
        log.epochs, log.samples = max(log.epochs, document["epoch"]), log.samples + 1
        log.is_changed = log.is_changed or is_changed

    def _open(self, copy: str | None, policy: str) -> _OpenLog:
        path = self.path_for(policy if copy is None else Path(copy).stem.partition("-")[2])
        file = self._files.enter_context(binary_file(path, is_private=self._is_private))
        original = {} if copy is None else dict(self._originals.header(copy).data)
        header = original or inspect_log.make_header(self._header, policy)
        writer = inspect_log.InspectWriter(file, header, as_json=path.suffix == ".json")
        self._files.callback(writer.release)
        return _OpenLog(writer, header)

    def close(self) -> None:
        """Write the headers. Results are omitted if they are not the results of the written samples."""
        for (copy, _), log in self._logs.items():
            if copy is None:
                log.header["eval"]["dataset"] |= {"samples": len(log.sample_ids), "sample_ids": list(log.sample_ids)}
                log.header["eval"]["config"]["epochs"] = log.epochs
            elif log.is_changed or log.samples != self._originals.files.get(copy, {}).get("episodes"):
                log.header.pop("results", None)
                log.header.pop("reductions", None)
            log.writer.close()

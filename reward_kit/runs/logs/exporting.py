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
from typing import IO, Any, NamedTuple

from reward_kit.episodes.record import episode_to_record
from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.private_files import make_private_folder
from reward_kit.runs.export import STDOUT, binary_file
from reward_kit.runs.files import copied_log
from reward_kit.runs.logs import atif, inspect_log, verifiers_traces
from reward_kit.runs.logs.documents import Document, LogArchive, find_document
from reward_kit.runs.logs.formats import LogFormat, LogHeader
from reward_kit.runs.logs.importing import FORMATS
from reward_kit.runs.logs.records import LOG, FieldReport, is_same, restore, score_line, to_episode
from reward_kit.runs.results import Result
from reward_kit.runs.run_folder import RunHeader

EXPORTED = tuple(name for name, form in FORMATS.items() if form.to_document is not None)
"""The formats that a run can be exported to."""


class ExportedLogs(NamedTuple):
    """The written files, the number of episodes, and the fields that the format has no place for."""

    paths: list[Path]
    episodes: int
    dropped: Counter[str]


class _Original(NamedTuple):
    """The imported document of an episode, and its data after the conversion to an episode and back."""

    document: Document
    converted: dict[str, Any]


class _Export(NamedTuple):
    """The exported document of an episode, and the imported document, if any. It is changed if the two differ."""

    document: dict[str, Any]
    original: Document | None
    is_changed: bool


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
            header = inspect_log.read_header(path, to_end=True) if is_inspect else self._form.header(path)
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
        return _Original(document, self._form.to_document(episode_to_record(episode), line))


def _export(form: LogFormat, originals: _Originals, result: Result) -> _Export:
    assert form.to_document is not None
    current = form.to_document(result.episode, result.score)
    original = originals.find(result.episode)
    if original is None:
        return _Export(current, None, is_changed=True)
    restored = restore(original.document.data, original.converted, current)
    return _Export(restored, original.document, is_changed=not is_same(restored, original.document.data))


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
        logs = _WRITERS[form](run, header, originals, target, is_private, files)
        for result in results:
            with boundary(StoreError, f"episodes.jsonl: {result.episode['rollout_id']} cannot be read as an episode"):
                exported.dropped.update(FORMATS[form].lost_fields(result.episode, result.score))
                export = _export(FORMATS[form], originals, result)
            logs.add(result, export)
            exported = exported._replace(episodes=exported.episodes + 1)
        logs.close()
    return exported._replace(paths=logs.paths)


class _Logs:
    """The files of an export."""

    suffix = ".json"

    def __init__(
        self, run: Path, header: RunHeader, originals: _Originals, target: Path, is_private: bool, files: ExitStack
    ) -> None:
        self._run, self._header, self._originals, self._target = run, header, originals, target
        self._is_private, self._files = is_private, files
        self.paths: list[Path] = []
        self._is_file = target == STDOUT or target.suffix in (".json", ".jsonl", ".eval")
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

    def add(self, result: Result, export: _Export) -> None:
        """Write a document."""
        raise NotImplementedError

    def close(self) -> None:
        """Complete the files."""


class _Trajectories(_Logs):
    """One JSON file for each episode."""

    def add(self, result: Result, export: _Export) -> None:
        """Write a document."""
        path = self.path_for(result.episode["rollout_id"])
        with binary_file(path, is_private=self._is_private) as file:
            file.write(json.dumps(export.document, indent=2).encode("ascii") + b"\n")


class _TraceFiles(_Logs):
    """One JSONL file for each imported log of verifiers or, for other runs, one file."""

    suffix = ".jsonl"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._opened: dict[str | None, IO[bytes]] = {}
        self._line: dict[str, Any] = {}  # the imported line whose traces are being collected
        self._parent: Mapping[str, Any] | None = None
        self._file: IO[bytes] | None = None

    def add(self, result: Result, export: _Export) -> None:
        """Write a trace as a line, or add it to the line that contained it."""
        copy, original = self._originals.copy_of(result.episode), export.original
        if copy not in self._opened:
            path = self.path_for("traces" if copy is None else Path(copy).stem.partition("-")[2])
            self._opened[copy] = self._files.enter_context(binary_file(path, is_private=self._is_private))
        group = str(result.episode["group_id"])
        task = self._header.task_name
        parent = original.parent if original is not None else verifiers_traces.make_line(export.document, task, group)
        if parent is None or parent is not self._parent:
            self._write_line()
            self._file, self._parent = self._opened[copy], parent
            self._line = export.document if parent is None else {**parent, "traces": []}
        if parent is not None and parent["traces"]:
            self._line["traces"].append(export.document)
            if export.is_changed:
                self._line["ok"] = all(trace.get("ok") for trace in self._line["traces"])

    def _write_line(self) -> None:
        if self._file is not None and self._line:
            self._file.write(json.dumps(self._line).encode("ascii") + b"\n")
        self._line, self._parent = {}, None

    def close(self) -> None:
        """Write the last line."""
        self._write_line()


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

    def add(self, result: Result, export: _Export) -> None:
        """Write a sample to the log of its policy."""
        record, document = result.episode, export.document
        key = self._originals.copy_of(record), str(record["policy"])
        if key not in self._logs:
            self._logs[key] = self._open(*key)
        log = self._logs[key]
        log.writer.add(document)
        log.sample_ids[str(document["id"])] = None
        log.epochs, log.samples = max(log.epochs, document["epoch"]), log.samples + 1
        log.is_changed = log.is_changed or export.is_changed

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


_WRITERS: dict[str, type[_Logs]] = {
    inspect_log.NAME: _InspectLogs,
    atif.NAME: _Trajectories,
    verifiers_traces.NAME: _TraceFiles,
}

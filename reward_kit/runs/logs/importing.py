"""Import of logs as a run, and detection of their formats."""

from __future__ import annotations

import hashlib
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.errors import ConfigError, boundary, did_you_mean
from reward_kit.private_files import make_private_folder
from reward_kit.runs.files import LOG_COPIES, open_part, wrap_os_errors
from reward_kit.runs.logs import atif, inspect_log, transcripts, verifiers_traces
from reward_kit.runs.logs.documents import JsonText, open_text, read_documents
from reward_kit.runs.logs.formats import LogFormat, LogHeader
from reward_kit.runs.logs.records import FieldReport, encodable, score_line, to_episode
from reward_kit.runs.redaction import Redaction, known_secrets
from reward_kit.runs.run_folder import RunFolder, RunHeader, new_run_path
from reward_kit.runs.summary import EpisodeRow, PolicySummary, summarize, summary_to_json

FORMATS: dict[str, LogFormat] = {
    form.name: form
    for form in (
        LogFormat(
            inspect_log.NAME,
            inspect_log.read_samples,
            inspect_log.to_log,
            inspect_log.read_header,
            inspect_log.to_sample,
            inspect_log.lost_fields,
        ),
        LogFormat(transcripts.CHAT, read_documents, transcripts.chat_to_log),
        LogFormat(transcripts.RESPONSES, read_documents, transcripts.response_to_log),
        LogFormat(transcripts.CLAUDE, transcripts.read_sessions, transcripts.session_to_log),
        LogFormat(atif.NAME, read_documents, atif.to_log, atif.read_trial, atif.to_trajectory),
        LogFormat(
            verifiers_traces.NAME,
            verifiers_traces.read_traces,
            verifiers_traces.to_log,
            verifiers_traces.read_header,
            verifiers_traces.to_trace,
            verifiers_traces.lost_fields,
        ),
    )
}
_MOST_KEYS = 100
_CLAUDE_TYPES = ("summary", "user", "assistant", "system", "file-history-snapshot", "queue-operation")


class ImportedRun(NamedTuple):
    """An imported run.

    Attributes:
        path: the directory.
        policies: the summary of each policy.
        report: the fields without a place of their own in an episode.
    """

    path: Path
    policies: Sequence[PolicySummary]
    report: FieldReport


class _Source(NamedTuple):
    path: Path
    form: LogFormat
    header: LogHeader
    copy: str


def import_logs(
    files: Sequence[Path], log_dir: Path, *, form: str | None = None, scorer: str | None = None
) -> ImportedRun:
    """Import logs as one run. If a log is invalid, no run is created.

    Args:
        files: the logs.
        log_dir: the parent of the new directory.
        form: the format, a key of `FORMATS`. By default, the format of each log is detected.
        scorer: the name of the score to use.

    Raises:
        ConfigError: a log is missing, damaged, empty or of an unknown format.
        StoreError: the run cannot be written.
    """
    sources = _open_sources(files, form)
    tasks = {source.header.task for source in sources}
    name = sources[0].header.task if len(tasks) == 1 and None not in tasks else None
    name = name or sources[0].path.name.partition(".")[0] or "log"
    path = new_run_path(log_dir, name)
    part = path.with_name(f".{path.name}.part")
    name, data = encodable([name, str(sources[0].path.resolve())])
    header = RunHeader(run_id=path.name, task_name=name, data=data)
    folder = RunFolder.create(part, header, Redaction(known_secrets()))
    try:
        imported = _import_into(folder, sources, len(tasks) > 1, scorer)
        with wrap_os_errors("write", path):
            part.rename(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    from reward_kit.report.run_page import write_page

    write_page(path)
    return imported._replace(path=path)


def _open_sources(files: Sequence[Path], form: str | None) -> list[_Source]:
    """Read the headers of the logs. Logs of the same model and task get different policy names."""
    sources = []
    for number, path in enumerate(files):
        if not path.is_file():
            near = (
                did_you_mean(path.name, (entry.name for entry in path.parent.iterdir())) if path.parent.is_dir() else ""
            )
            raise ConfigError(f"{path}: is not a file{near if near.endswith('?') else ''}")
        known = FORMATS[form] if form is not None else detect_format(path)
        copy = f"{number}-{re.sub(r'[^A-Za-z0-9._-]+', '-', path.name)[-100:]}"
        sources.append(_Source(path, known, known.header(path), copy))
    repeated = Counter((source.header.task, source.header.model) for source in sources)
    stems = Counter(source.path.stem for source in sources)

    def name(path: Path) -> str:
        return path.stem if stems[path.stem] == 1 else f"{path.resolve().parent.name}/{path.stem}"

    return [
        source._replace(header=replace(source.header, model=f"{source.header.model} ({name(source.path)})"))
        if source.header.model is not None and repeated[source.header.task, source.header.model] > 1
        else source
        for source in sources
    ]


def _facts(source: _Source, sha256: str) -> dict[str, Any]:
    facts = {"path": str(source.path.resolve()), "format": source.form.name, "copy": f"{LOG_COPIES}/{source.copy}"}
    trial = {"trial": source.header.data["trial"]} if "trial" in source.header.data else {}
    return {**facts, "sha256": sha256, "model": source.header.model, **trial}


def _import_into(folder: RunFolder, sources: Sequence[_Source], has_tasks: bool, scorer: str | None) -> ImportedRun:
    report = FieldReport(Counter(), Counter())
    rows: list[EpisodeRow] = []
    indices: Counter[tuple[str, str]] = Counter()
    names: dict[str, None] = {}
    counts: Counter[str] = Counter()
    digests: list[str] = []
    copies = folder.path / LOG_COPIES
    make_private_folder(copies)
    with folder:
        for source in sources:
            origin = {"format": source.form.name, "copy": f"{LOG_COPIES}/{source.copy}"}
            for document in source.form.documents(source.path):
                where = f"{source.path}: {document.where}"
                with boundary(ConfigError, f"{where}: cannot be read as {source.form.name}"):
                    log = source.form.to_log(document, source.header, report, where)
                    log.policy = encodable(log.policy)
                    if has_tasks and source.header.task is not None:
                        log.sample_id = f"{source.header.task}/{log.sample_id}"
                    index = indices[log.policy, log.sample_id]
                    episode = to_episode(log, index, {**origin, "where": document.where}, where)
                    names |= dict.fromkeys(score.name for score in (*log.scores, *log.metrics))
                    line = score_line(log, episode.id_, source.form.name, scorer)
                indices[log.policy, log.sample_id] += 1
                folder.append_episode(episode)
                row = EpisodeRow.from_episode(episode)
                if line is not None:
                    folder.append_score(line)
                    row.add_score(line)
                rows.append(row)
                counts[source.copy] += 1
            digests.append(_copy(source.path, copies / source.copy))
        if not rows:
            raise ConfigError(f"{sources[0].path}: has no episodes; pass a log with samples or messages")
        if scorer is not None and scorer not in names:
            raise ConfigError(f"--score {scorer}: no episode has this score{did_you_mean(scorer, names)}")
        policies = summarize(rows, folder.header.pass_threshold)
        folder.write_summary(summary_to_json(policies))
        fields = {"extra": dict(report.extra), "log_only": dict(report.log_only)}
        listed = [
            _facts(source, digest) | {"episodes": counts[source.copy]}
            for source, digest in zip(sources, digests, strict=True)
        ]
        imported = encodable({"files": listed, "fields": fields, "scores": list(names)})
        folder.write_header(folder.header.replace(total=len(rows), imported=imported))
        folder.update_status(status="complete", worked_s=0.0)
    return ImportedRun(folder.path, policies, report)


def _copy(source: Path, target: Path) -> str:
    """Copy a log, and return its SHA-256."""
    digest = hashlib.sha256()
    with wrap_os_errors("copy", source), source.open("rb") as log, open_part(target, target, is_private=True) as copy:
        while chunk := log.read(1 << 20):
            digest.update(chunk)
            copy.write(chunk)
    return digest.hexdigest()


def detect_format(path: Path) -> LogFormat:
    """Return the format of a log, which is detected from its content.

    Raises:
        ConfigError: the format is unknown.
    """
    if zipfile.is_zipfile(path) or path.suffix == ".eval":
        return FORMATS[inspect_log.NAME]
    with open_text(path) as file:
        text = JsonText(file, path)
        first = text.peek()
        if first == "{" and (name := _name_of_object(text)) is not None:
            return FORMATS[name]
        item = next(text.items(), None) if first == "[" else None
        if isinstance(item, dict):
            if "role" in item and "content" in item:
                raise ConfigError(f'{path}: is a list of messages; write {{"messages": […]}}, one object per line')
            name = next((name for key in item if (name := _format_of(key, item[key])) is not None), None)
            if name is not None:
                return FORMATS[name]
    known = ", ".join(FORMATS)
    raise ConfigError(f"{path}: unknown format; pass --format with one of {known}")


def _name_of_object(text: JsonText) -> str | None:
    """Return the format of the object at this position. Only the beginning of a large object is parsed."""
    for number, (key, value) in enumerate(text.pairs()):
        if key in ("eval", "samples"):
            return inspect_log.NAME
        if number >= _MOST_KEYS:
            break
        if (name := _format_of(key, value())) is not None:
            return name
    return None


def _format_of(key: str, value: Any) -> str | None:
    """Return the format to which a key of a document belongs, or None if the key occurs in several formats."""
    if key == "schema_version" and str(value).startswith("ATIF"):
        return atif.NAME
    if key in ("sessionId", "parentUuid", "leafUuid", "isSidechain") or (key == "type" and value in _CLAUDE_TYPES):
        return transcripts.CLAUDE
    if key == "messages" and isinstance(value, list):
        return transcripts.CHAT
    if key in ("nodes", "traces") and isinstance(value, list):
        return verifiers_traces.NAME
    return transcripts.RESPONSES if key == "output" and isinstance(value, list) else None

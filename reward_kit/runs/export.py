"""Export a run as tables of its episodes, scores and steps, in Parquet or CSV.

A cell is a string, a float, an integer or a flag, or None if unknown. Structures are written as JSON, in the same form
as in the run's files.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from reward_kit.display_text import printable
from reward_kit.episodes.json_codec import from_json_value
from reward_kit.errors import ConfigError, StoreError, did_you_mean, install_hint
from reward_kit.runs.files import CREDIT_FILE, replacing, wrap_os_errors
from reward_kit.runs.results import Result, index_credit, read_results
from reward_kit.runs.run_folder import RunHeader
from reward_kit.runs.summary import TOKEN_DETAILS, total_usage

STDOUT = Path("-")
Kind = Literal["text", "number", "count", "flag"]
Cell = str | float | int | bool | None
Row = Sequence[Cell]
_LARGEST_COUNT = 2**63 - 1
_BATCH_ROWS = 2_000
_BATCH_CHARACTERS = 8_000_000
# Characters that start a formula in a spreadsheet (OWASP, "CSV Injection"), in both widths, and the escape "'" itself.
# Removing one leading "'" therefore restores every string.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠", "'")


# Selection


@dataclass(slots=True)
class Selection:
    """The selection of episodes to export.

    Attributes:
        pass_threshold: the lowest passing score.
        min_score: the lowest score to export, or None to include unscored episodes.
        only_passed: whether to export only episodes that passed.
        policies: the policies to export; all if empty.
        left_out: the number of omitted episodes by reason, updated while episodes are read.
        seen: the policies of the run, updated while episodes are read.
    """

    pass_threshold: float
    min_score: float | None = None
    only_passed: bool = False
    policies: Sequence[str] = ()
    left_out: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)


def selected(run: Path, selection: Selection) -> Iterator[Result]:
    """Yield the selected episodes of a run, and count the omitted episodes."""
    for result in read_results(run):
        policy, score = result.episode.get("policy"), None
        selection.seen.add(str(policy))
        if selection.min_score is not None or selection.only_passed:
            score = result.row().score
        if selection.policies and policy not in selection.policies:
            selection.left_out["from another policy"] += 1
        elif selection.min_score is None and not selection.only_passed:
            yield result
        elif score is None:
            selection.left_out["unscored"] += 1
        elif selection.only_passed and score < selection.pass_threshold:
            selection.left_out[f"below the pass threshold {selection.pass_threshold:g}"] += 1
        elif selection.min_score is not None and score < selection.min_score:
            selection.left_out[f"below {selection.min_score:g}"] += 1
        else:
            yield result
    for policy in selection.policies:
        if policy not in selection.seen:
            near = did_you_mean(policy, sorted(selection.seen))
            raise ConfigError(f"--policy {policy}: no episode has this policy{near}")


def read_header(run: Path) -> RunHeader:
    """Return the header of a run. Raise a ConfigError if it is a training run, which has no episodes."""
    header = RunHeader.read_folder(run)
    if header.training is not None:
        raise ConfigError(f"{run} is a training run; its figures are in metrics.jsonl, one JSON object per line")
    return header


class CreditLines:
    """A reader that returns the lines of a run's `credit.jsonl` for each episode."""

    def __init__(self, run: Path) -> None:
        self._path = run / CREDIT_FILE
        self._index = index_credit(run)

    def read(self, rollout_id: str) -> list[Mapping[str, Any]]:
        """Return the lines of one episode."""
        if (lines_at := self._index.get(rollout_id)) is None:
            return []
        with wrap_os_errors("read", self._path), self._path.open("rb") as lines:
            lines.seek(lines_at.offset)
            block = lines.read(lines_at.length)
        try:
            return [json.loads(line) for line in block.splitlines()]
        except ValueError as error:
            raise StoreError(f"{self._path}: the credit of {rollout_id} is not JSON: {error}") from None


# Tables


class ExportColumn(NamedTuple):
    """A column of a table, and the type of its cells."""

    name: str
    kind: Kind


class Table(NamedTuple):
    """A table: its name, which is also the name of its file, and its columns in order."""

    name: str
    columns: Sequence[ExportColumn]


def _table(name: str, columns: str) -> Table:
    """Create a table from columns, each specified as `name` or `name:kind`; the default kind is text."""
    pairs = (column.partition(":") for column in columns.split())
    kinds: dict[str, Kind] = {"": "text", "n": "number", "c": "count", "f": "flag"}
    return Table(name, tuple(ExportColumn(column, kinds[kind]) for column, _, kind in pairs))


_IDS = "rollout_id sample_id group_id rollout_index policy"
_ID_COLUMNS = "rollout_id sample_id group_id rollout_index:c policy"
EPISODES = _table(
    "episodes",
    f"{_ID_COLUMNS} attempt:c score:n passed:f is_imputed:f reason stop_reason error_class error num_steps:c "
    "environment_return:n terminated:f truncated:f prompt_tokens:c completion_tokens:c cached_tokens:c "
    "cache_write_tokens:c reasoning_tokens:c cost_usd:n started_at duration_s:n policy_s:n environment_s:n "
    "ground_truth sample messages",
)
SCORES = _table(
    "scores",
    f"{_ID_COLUMNS} name score:n reason is_score_valid:f scorer scorer_hash failure_class duration_s:n",
)
STEPS = _table(
    "steps",
    f"{_ID_COLUMNS} step:c state_key observation action raw_action reward:n is_action_valid:f step_score:n "
    "step_reason base_reward:n return_to_go:n value:n A_E:n A_S:n A:n anchor:c peers:c",
)
TABLES = {table.name: table for table in (EPISODES, SCORES, STEPS)}


def table_rows(table: Table, result: Result, pass_threshold: float, credit: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of one episode."""
    if table is EPISODES:
        rows = [_episode(result, pass_threshold)]
    else:
        rows = list(_scores(result) if table is SCORES else _steps(result, credit))
    ids = {name: result.episode.get(name) for name in _IDS.split()}
    return [[_CONVERTERS[column.kind]((ids | row).get(column.name)) for column in table.columns] for row in rows]


def _episode(result: Result, pass_threshold: float) -> dict[str, Any]:
    record, row = result.episode, result.row()
    usage, timing = total_usage(record), record.get("timing") or {}
    names = ("attempt", "stop_reason", "num_steps", "environment_return", "terminated", "truncated")
    cells = {name: record.get(name) for name in (*names, "ground_truth", "sample", "messages")}
    cells |= {name: timing.get(name) for name in ("started_at", "duration_s", "policy_s", "environment_s")}
    return cells | {
        **{name: usage.get(name) for name in ("prompt_tokens", "completion_tokens", *TOKEN_DETAILS)},
        "cost_usd": usage.get("cost"),
        "score": row.score,
        "passed": None if row.score is None else row.score >= pass_threshold,
        "is_imputed": row.is_imputed,
        "reason": _result(result).get("reason"),
        "error_class": row.error_class or row.score_error,
        "error": row.error_message,
    }


def _result(result: Result) -> Mapping[str, Any]:
    return (result.score or {}).get("result") or {}


def _scores(result: Result) -> Iterator[dict[str, Any]]:
    """Yield a row named "score" and a row for each metric, or nothing if the episode has not been scored yet."""
    if result.score is None:
        return
    line, found = result.score, _result(result)
    scorer = line.get("scorer") or {}
    common = {
        "scorer": scorer.get("id"),
        "scorer_hash": scorer.get("hash"),
        "duration_s": (line.get("timing") or {}).get("duration_s"),
        "failure_class": (line.get("failure") or {}).get("class"),
    }
    score, is_valid = line.get("score"), line.get("score") is not None
    yield {**common, "name": "score", "score": score, "reason": found.get("reason"), "is_score_valid": is_valid}
    for name, metric in (found.get("metrics") or {}).items():
        yield {**common, "name": name, **{key: metric.get(key) for key in ("score", "reason", "is_score_valid")}}


def _steps(result: Result, credit: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    record = result.episode
    outputs = {str(output.get("step_index")): output for output in _result(result).get("step_outputs") or ()}
    worth = {line.get("step"): line for line in credit}
    parts = [*record["steps"], record.get("final") or {}]
    for t, step in enumerate(record["steps"]):
        output, credited = outputs.get(str(t)) or {}, worth.get(t) or {}
        action, turn = step.get("action"), step.get("assistant_turn")
        if "observation" in step:
            observation = step["observation"]
        else:  # The message before the action
            observation = record["messages"][turn - 1].get("content") if turn else None
        if isinstance(action, Mapping) and action.get("type") == "text":
            action = action.get("content")
        names = ("return_to_go", "value", "A_E", "A_S", "A", "anchor", "peers", "base_reward")
        yield {name: credited.get(name) for name in names} | {
            "step": t,
            "state_key": step.get("state_key"),
            "observation": observation,
            "action": action,
            "raw_action": (step.get("outputs") or {}).get("raw_policy_output"),
            "reward": step.get("reward"),
            "is_action_valid": (parts[t + 1].get("info") or {}).get("is_action_valid"),
            "step_score": output.get("base_reward"),
            "step_reason": output.get("reason"),
        }


def _text(value: Any) -> str | None:
    """Return a string, or a structure as JSON. Lone surrogates are escaped."""
    if value is None:
        return None
    plain = from_json_value(value) if isinstance(value, Mapping) else value
    text = plain if isinstance(plain, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _number(value: Any) -> float | None:
    value = from_json_value(value) if isinstance(value, Mapping) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # An integer outside the range of floats
        return None


def _count(value: Any) -> int | None:
    number = _number(value)
    return None if number is None or abs(number) >= _LARGEST_COUNT else int(value)


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


_CONVERTERS = {"text": _text, "number": _number, "count": _count, "flag": _flag}


# Files


class TableWriter:
    """A writer of a table in batches; `close` completes the file.

    Args:
        file: the file.
        form: "csv" (RFC 4180, UTF-8, column names in the first row; a missing value is empty, an empty string is `""`)
            or "parquet" (a row group for each batch).
        table: the table, including its columns.
        metadata: the run's metadata for the schema of a Parquet file.
        is_raw: whether to leave strings in CSV unescaped, even if a spreadsheet would evaluate them as formulas.

    Raises:
        ConfigError: pyarrow is not installed.
    """

    def __init__(
        self, file: IO[bytes], form: str, table: Table, metadata: Mapping[str, str], *, is_raw: bool = False
    ) -> None:
        if find_spec("pyarrow") is None:
            raise ConfigError(f"--format {form} needs pyarrow; {install_hint('export')}")
        self._arrow: Any = import_module("pyarrow")
        kinds = {"text": "string", "number": "double", "count": "int64", "flag": "bool"}
        fields = [(column.name, self._arrow.type_for_alias(kinds[column.kind])) for column in table.columns]
        self._schema = self._arrow.schema(fields, metadata=dict(metadata))
        self._escapes = form == "csv" and not is_raw
        if form == "csv":
            self._writer: Any = import_module("pyarrow.csv").CSVWriter(file, self._schema)
        else:
            self._writer = import_module("pyarrow.parquet").ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[Row] = []
        self._characters = 0

    def write(self, row: Row) -> None:
        """Add one row."""
        if self._escapes:
            row = [escape_formula(cell) if isinstance(cell, str) else cell for cell in row]
        self._rows.append(row)
        self._characters += sum(len(cell) for cell in row if isinstance(cell, str))
        if len(self._rows) >= _BATCH_ROWS or self._characters >= _BATCH_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            pairs = zip(zip(*self._rows, strict=True), self._schema, strict=True)
            columns = [self._arrow.array(cells, type=field.type) for cells, field in pairs]
            self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))
        self._rows, self._characters = [], 0

    def close(self) -> None:
        """Write the remaining rows and the end of the file."""
        self._flush()
        self._writer.close()


def escape_formula(text: str) -> str:
    """Prefix a string with "'" if a spreadsheet would evaluate it as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


class _Terminal(io.RawIOBase):
    """A binary file that writes to the terminal and escapes control characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        sys.stdout.write(printable(self._decoder.decode(bytes(data))))
        return len(data)


@contextmanager
def open_table(
    path: Path,
    form: str,
    table: Table,
    metadata: Mapping[str, str],
    *,
    is_raw: bool = False,
    is_private: bool = False,
) -> Iterator[TableWriter]:
    """Yield a table writer. At the end of the block, its file replaces an existing file."""
    with binary_file(path, is_private=is_private) as file:
        writer = TableWriter(file, form, table, metadata, is_raw=is_raw)
        yield writer
        writer.close()


@contextmanager
def binary_file(path: Path, *, is_private: bool = False) -> Iterator[IO[bytes]]:
    """Yield a binary file that replaces `path` at the end of the block. The path "-" is standard output."""
    if path == STDOUT:
        yield cast(IO[bytes], _Terminal()) if sys.stdout.isatty() else sys.stdout.buffer
        sys.stdout.flush()
        return
    with replacing(path, is_private=is_private) as file:
        yield file

"""Where a table goes: a CSV or Parquet file that is there as a whole or not at all, or standard output."""

from __future__ import annotations

import csv
import io
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol, cast

from reward_kit.display_text import printable
from reward_kit.errors import ConfigError, how_to_install
from reward_kit.runs.export.columns import Cell, Row, Table
from reward_kit.runs.files import open_part, told_of

STDOUT = Path("-")
_BATCH_ROWS = 2_000
_BATCH_CHARACTERS = 8_000_000
# What a spreadsheet takes for the beginning of a formula (OWASP, "CSV Injection"), in both widths, and the mark itself,
# so that taking one away from each text that begins with one gives every text back.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠", "'")


class Sink(Protocol):
    """Takes the rows of one table."""

    def write(self, row: Row) -> None:
        """One row."""


class CsvSink:
    """CSV as in RFC 4180, in UTF-8, with the names of the columns first; None is an empty cell.

    Args:
        file: where to.
        table: which columns.
        is_raw: texts are written as they are, also where a spreadsheet would take them for formulas.
    """

    def __init__(self, file: IO[str], table: Table, *, is_raw: bool = False) -> None:
        self._writer = csv.writer(file)
        self._is_raw = is_raw
        self._writer.writerow([column.name for column in table.columns])

    def write(self, row: Row) -> None:
        """One row."""
        self._writer.writerow([self._cell(cell) for cell in row])

    def _cell(self, cell: Cell) -> str:
        if isinstance(cell, bool):
            return "true" if cell else "false"
        if isinstance(cell, str):
            return cell if self._is_raw else harmless(cell)
        return "" if cell is None else repr(cell)


def harmless(text: str) -> str:
    """A text that no spreadsheet takes for a formula: with a "'" before it where one might."""
    return f"'{text}" if text.startswith(_FORMULA) else text


class ParquetSink:
    """Parquet, a row group for every so many rows or characters. Use `opened`, which closes it.

    Args:
        file: where to.
        table: which columns.
        told: of the run, kept with the schema.

    Raises:
        ConfigError: pyarrow is not installed.
    """

    def __init__(self, file: IO[bytes], table: Table, told: dict[str, str]) -> None:
        if find_spec("pyarrow") is None:
            raise ConfigError(f"--format parquet needs pyarrow; {how_to_install('export')}, or take --format csv")
        arrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
        kinds = {"text": arrow.string(), "number": arrow.float64(), "count": arrow.int64(), "flag": arrow.bool_()}
        fields = [arrow.field(column.name, kinds[column.kind]) for column in table.columns]
        self._arrow, self._schema = arrow, arrow.schema(fields, metadata=told)
        self._writer = parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[Row] = []
        self._characters = 0

    def write(self, row: Row) -> None:
        """One row."""
        self._rows.append(row)
        self._characters += sum(len(cell) for cell in row if isinstance(cell, str))
        if len(self._rows) >= _BATCH_ROWS or self._characters >= _BATCH_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            columns = [
                self._arrow.array(cells, type=field.type)
                for cells, field in zip(zip(*self._rows, strict=True), self._schema, strict=True)
            ]
            self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))
        self._rows, self._characters = [], 0

    def close(self) -> None:
        """Write what is left, and the end of the file."""
        self._flush()
        self._writer.close()


class _Terminal:
    """Standard output where it is a terminal, on which untrusted text could act: control characters are escaped."""

    def write(self, text: str) -> int:
        return sys.stdout.write(printable(text.replace("\r\n", "\n")))


@contextmanager
def opened(
    path: Path, form: str, table: Table, told: dict[str, str], *, is_raw: bool = False, is_private: bool = False
) -> Iterator[Sink]:
    """A table's file, in the place of an earlier one once its last row is written.

    Args:
        path: the file; "-" is standard output.
        form: "csv" or "parquet".
        table: which columns.
        told: of the run, kept where the format has a place for it.
        is_raw: see `CsvSink`.
        is_private: the file is its owner's alone; by default the umask decides.

    Raises:
        ConfigError: what writes the format is not installed.
        StoreError: the file cannot be written.
    """
    if form == "csv":
        with text_file(path, newline="", is_private=is_private) as file:
            yield CsvSink(file, table, is_raw=is_raw)
        return
    with _replaced(path) as part, told_of("write", path), open_part(part, path, is_private=is_private) as data:
        sink = ParquetSink(data, table, told)
        yield sink
        sink.close()


@contextmanager
def text_file(path: Path, newline: str = "\n", *, is_private: bool = False) -> Iterator[IO[str]]:
    """A file of text, in the place of an earlier one once it is whole; "-" is standard output."""
    if path == STDOUT:
        yield cast(IO[str], _Terminal()) if sys.stdout.isatty() else sys.stdout
        sys.stdout.flush()
        return
    with (
        _replaced(path) as part,
        told_of("write", path),
        io.TextIOWrapper(open_part(part, path, is_private=is_private), encoding="utf-8", newline=newline) as file,
    ):
        yield file


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield part
        with told_of("write", path):
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)

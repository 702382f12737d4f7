"""Documents of an untrusted log, read one at a time: members of a zip archive, items of a JSON list, or lines.

Memory use depends on the size of the largest document, not on the size of the log. Members of archives are never
written to disk, so their names may be arbitrary.
"""

from __future__ import annotations

import io
import json
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

from reward_kit.errors import ConfigError, describe_read_error, install_hint
from reward_kit.runs.files import read_line
from reward_kit.safe_input import (
    LOG_DOCUMENT_BYTES,
    LOG_DOCUMENT_VALUES,
    LOG_EXPANSION,
    TooLargeError,
    check_values,
    format_size,
)

_ZSTANDARD = 93  # section 4.4.5 of the zip specification
_LOCAL_HEADER = 30
_WINDOW_BYTES = 2**27
_CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\r\n\ufeff]*")
_DECODER = json.JSONDecoder()
_AGAIN = "save the log again, and check that the copy is complete"


class Document(NamedTuple):
    """A document of a log.

    Attributes:
        where: its location in the log: the name of a member, a JSON path, or a line.
        data: the parsed JSON.
        parent: the object that contains the document, if a line has several documents.
    """

    where: str
    data: Any
    parent: Mapping[str, Any] | None = None


def parse_document(data: bytes, where: str) -> Any:
    """Parse JSON. NaN and infinity are allowed, because logs contain them.

    Raises:
        ConfigError: the text is not JSON, or has too many values.
    """
    try:
        check_values(data, LOG_DOCUMENT_VALUES)
        return read_line(data)
    except TooLargeError as limit:
        raise ConfigError(f"{where}: exceeds the limit of {limit}; split the log") from None
    except RecursionError:
        raise ConfigError(f"{where}: values are nested too deeply; {_AGAIN}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {str(error)[:200]}; {_AGAIN}") from None


# Archives


class LogArchive:
    """A zip archive, whose members may be compressed with Zstandard. Use it as a context manager.

    Raises:
        ConfigError: the file is not a zip archive, or its members expand too much.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: IO[bytes] = path.open("rb")
        except OSError as error:
            raise ConfigError(f"{path}: {describe_read_error(path, error)}") from None
        try:
            self._zip = zipfile.ZipFile(self._file)
            # A name may occur more than once; the last member counts.
            self._members = {info.filename: info for info in self._zip.infolist()}
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, struct.error) as error:
            self._file.close()
            raise ConfigError(f"{path}: not a complete zip archive ({error}); {_AGAIN}") from None
        self._check_size()

    def _check_size(self) -> None:
        size, expanded = self.path.stat().st_size, sum(info.file_size for info in self._members.values())
        if expanded > max(LOG_DOCUMENT_BYTES, LOG_EXPANSION * size):
            self._file.close()
            raise ConfigError(
                f"{self.path}: expands from {format_size(size)} to {format_size(expanded)}, more than {LOG_EXPANSION} "
                "times its size; import a log that its tool wrote"
            )

    def __enter__(self) -> LogArchive:
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()
        self._file.close()

    @property
    def names(self) -> list[str]:
        """The names of the members, in order."""
        return list(self._members)

    def read(self, name: str) -> bytes:
        """Return the content of a member.

        Raises:
            ConfigError: the member is damaged or too large, or its compression is not supported.
        """
        info, where = self._members[name], f"{self.path}: {name}"
        if info.file_size > LOG_DOCUMENT_BYTES:
            raise ConfigError(f"{where}: exceeds the limit of {format_size(LOG_DOCUMENT_BYTES)}; split the log")
        try:
            if info.compress_type == _ZSTANDARD and sys.version_info < (3, 14):
                return self._read_zstandard(info, where)
            with self._zip.open(info) as member:
                return member.read()
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
            raise ConfigError(f"{where}: cannot be decompressed ({error}); {_AGAIN}") from None

    def _read_zstandard(self, info: zipfile.ZipInfo, where: str) -> bytes:
        if find_spec("zstandard") is None:
            raise ConfigError(f"{where}: is compressed with Zstandard; {install_hint('logs')}")
        zstandard: Any = import_module("zstandard")
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL_HEADER)
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04" or info.flag_bits & 1:
            raise zipfile.BadZipFile("bad or encrypted member")
        self._file.seek(sum(struct.unpack("<HH", header[26:])), io.SEEK_CUR)
        compressed = self._file.read(info.compress_size)
        try:
            decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
            with decompressor.stream_reader(compressed, read_across_frames=True) as stream:
                data = bytes(stream.read(info.file_size + 1))
        except zstandard.ZstdError as error:
            raise zipfile.BadZipFile(str(error)) from None
        if len(data) != info.file_size or zlib.crc32(data) != info.CRC:
            raise zipfile.BadZipFile("wrong size or checksum")
        return data

    def parse(self, name: str) -> Any:
        """Return the JSON value of a member."""
        return parse_document(self.read(name), f"{self.path}: {name}")


# JSON text


class JsonText:
    """A JSON file that is parsed value by value.

    Args:
        file: the text.
        path: the path for messages.
    """

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file, self._path = file, path
        self._text, self._at, self._is_end = "", 0, False
        self._line, self._counted = 1, 0  # the line of the character at `_counted`

    @property
    def line(self) -> int:
        """The number of the line at this position."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def pairs(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield the keys of the object at this position, each with a function that parses its value.

        The caller must parse the value, or call `items` if it is a list, before it continues.
        """
        self._expect("{")
        while self.peek() not in ("}", ""):
            key = self.value()
            if not isinstance(key, str):
                raise self._error("a key must be a string")
            self._expect(":")
            yield key, self.value
            if self.peek() == ",":
                self._at += 1
            elif self.peek() != "}":
                break
        self._expect("}")

    def items(self) -> Iterator[Any]:
        """Yield the items of the list at this position."""
        self._expect("[")
        while self.peek() not in ("]", ""):
            yield self.value()
            if self.peek() == ",":
                self._at += 1
            elif self.peek() != "]":
                break
        self._expect("]")

    def peek(self) -> str:
        """Return the next character that is not a space, or "" at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found is not None else self._at
            if self._at < len(self._text) or self._is_end:
                return self._text[self._at : self._at + 1]
            self._read_more()

    def value(self) -> Any:
        """Parse the value at this position."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.pos + 16 > len(self._text) or error.msg.startswith("Unterminated string")
                if self._is_end or not is_cut:
                    raise self._error(error.msg) from None
            except (ValueError, RecursionError) as error:
                deep = "values are nested too deeply"
                raise self._error(deep if isinstance(error, RecursionError) else str(error)[:100]) from None
            else:
                if end < len(self._text) or self._is_end:
                    self._at = end
                    return value
            self._read_more()

    def _read_more(self) -> None:
        rest, self._line, self._counted = self._text[self._at :], self.line, 0
        if len(rest) > LOG_DOCUMENT_BYTES:
            raise self._error(f"a value exceeds the limit of {format_size(LOG_DOCUMENT_BYTES)}")
        try:
            more = self._file.read(max(_CHUNK, len(rest)))
        except UnicodeDecodeError as error:
            raise self._error(f"not UTF-8 text ({error.reason})") from None
        self._text, self._at, self._is_end = rest + more, 0, not more

    def _expect(self, character: str) -> None:
        if self.peek() != character:
            raise self._error(f"expected {character!r}, got {self._text[self._at : self._at + 20]!r}")
        self._at += 1

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}:{self.line}: not JSON: {problem}; {_AGAIN}")


def open_text(path: Path) -> TextIO:
    """Open a text file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.open(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {describe_read_error(path, error)}") from None


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of a JSON or JSONL file: its lines, the items of its list, or its only object."""
    with open_text(path) as file:
        text, line, number = JsonText(file, path), 0, 0
        if text.peek() == "[":
            for number, item in enumerate(text.items()):
                yield Document(f"[{number}]", item)
            if text.peek():
                raise ConfigError(f"{path}:{text.line}: there is text after the list; remove it")
            return
        while text.peek():
            number = number + 1 if line == text.line else 1
            line = text.line
            yield Document(f"line {line}" if number == 1 else f"line {line}, document {number}", text.value())


def find_document(documents: Callable[[], Iterator[Document]]) -> Callable[[str], Document | None]:
    """Return a function that finds a document by its location. It is fast if they are requested in order."""
    current = documents()

    def find(where: str) -> Document | None:
        nonlocal current
        for _ in range(2):
            for document in current:
                if document.where == where:
                    return document
            current = documents()
        return None

    return find

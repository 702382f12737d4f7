"""A cache of model responses from earlier runs. Repeating an unchanged request therefore costs nothing.

Unlike a cassette, which must contain every request, a cache forwards requests that it does not contain to the endpoint.
The file is an SQLite database that multiple runs may use at the same time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.private_files import private_opener

_log = logging.getLogger(__name__)
_APPLICATION_ID = 0x7277_6B63  # identifies the file as a response cache
_WAIT_S = 10.0  # maximum wait for a different process that is writing


class ResponseCache:
    """A cache of responses, keyed by a hash of the URL and the request. Errors are not stored.

    Args:
        path: the path of the file. If the file does not exist, it is created.

    Attributes:
        hits: the number of requests that were answered from the cache.
        misses: the number of requests that had no cached response.
        redact: a function that is applied to each response before it is written.

    Raises:
        ConfigError: If the file cannot be read or written, or if it is not a response cache.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.hits = self.misses = 0
        self.redact: Callable[[bytes], bytes] = bytes
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()  # judges may run in threads
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(private_opener(self.path, os.O_RDWR | os.O_CREAT))
            self._database = sqlite3.connect(self.path, _WAIT_S, isolation_level=None, check_same_thread=False)
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cannot open the response cache {self.path}: {error}") from error

    def _prepare(self) -> None:
        (mark,) = self._database.execute("PRAGMA application_id").fetchone()
        (tables,) = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and mark != _APPLICATION_ID:
            raise ConfigError(f"{self.path} is an SQLite database but not a response cache; choose a different file")
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.execute(f"PRAGMA application_id={_APPLICATION_ID}")
        self._database.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer BLOB) WITHOUT ROWID")

    def key(self, url: str, body: bytes, scope: str) -> bytes:
        """Return the key for a request that `scope`, such as an episode, sends to a URL.

        If the request has a seed or temperature 0, all scopes share the response. Any other request is a new sample.
        The key of such a request also contains the scope and the number of identical requests that the scope has
        already sent.
        """
        request = json.loads(body)
        parts = [url, json.dumps(request, sort_keys=True, separators=(",", ":"))]
        if "seed" not in request and request.get("temperature") != 0:
            asked = "\n".join([*parts, scope])
            with self._lock:
                parts += [scope, str(self._asked[asked])]
                self._asked[asked] += 1
        return hashlib.sha256("\n".join(parts).encode()).digest()

    def find(self, key: bytes) -> Any:
        """Return the JSON value of a cached response, or None if there is none."""
        row = self._execute("SELECT answer FROM answers WHERE key = ?", key)
        if row is None:
            self.misses += 1
            return None
        self.hits += 1
        return json.loads(row[0])

    def keep(self, key: bytes, value: Any) -> None:
        answer = self.redact(json.dumps(value, separators=(",", ":")).encode("ascii"))
        self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, answer)

    def to_json(self) -> dict[str, Any]:
        """Return the path and the hit and miss counts for `summary.json`."""
        return {"path": str(self.path), "hits": self.hits, "misses": self.misses}

    def close(self) -> None:
        self._database.close()

    def _execute(self, statement: str, *values: bytes) -> tuple[bytes] | None:
        """Run a statement and return its first row.

        If the statement fails, for example because the disk is full, log a warning.
        """
        try:
            with self._lock:
                row: tuple[bytes] | None = self._database.execute(statement, values).fetchone()
            return row
        except sqlite3.Error as error:
            _log.warning("response cache %s: %s; the request is sent without the cache", self.path, error)
            return None

"""Log records as text: untrusted messages neither forge records nor act on a terminal."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from reward_kit.runs.events import log_to_file
from reward_kit.runs.redaction import Redaction

FORGED = "2026-01-01 00:00:00,000 ERROR reward_kit.runs forged line"
HOSTILE = f"an answer\n{FORGED}\r\n{FORGED}\x1b]0;title\x07\x1b[2J\u2028{FORGED}\u202e\x9b31m"


def log_of(path: Path, *secrets: str) -> str:
    logger = logging.getLogger("reward_kit.test")
    with log_to_file(path, Redaction(secrets)):
        logger.warning("the server sent %s", HOSTILE)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logger.exception("it broke: %s", HOSTILE, stack_info=True)
    return path.read_bytes().decode("utf-8")


def test_message_cannot_forge_or_split_lines_of_the_run_log(tmp_path: Path) -> None:
    text = log_of(tmp_path / "run.log")
    records = [line for line in text.splitlines() if not line.startswith("    ")]
    assert [line.split(" ")[2:4] for line in records] == [["WARNING", "reward_kit.test"], ["ERROR", "reward_kit.test"]]
    assert "    Traceback (most recent call last):" in text.splitlines()


def test_run_log_has_no_control_characters(tmp_path: Path) -> None:
    text = log_of(tmp_path / "run.log")
    assert {char for char in text if not char.isprintable()} == {"\n"}


def test_traceback_cached_by_another_handler_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Earlier(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            record.exc_text = logging.Formatter().formatException(sys.exc_info())  # type: ignore[arg-type]

    earlier = Earlier()
    package = logging.getLogger("reward_kit")
    package.addHandler(earlier)
    try:
        assert FORGED not in log_of(tmp_path / "run.log").splitlines()
    finally:
        package.removeHandler(earlier)


def test_multi_line_secret_is_redacted(tmp_path: Path) -> None:
    secret = "-----BEGIN KEY-----\nabcdefgh\n-----END KEY-----"
    logger = logging.getLogger("reward_kit.test")
    with log_to_file(tmp_path / "run.log", Redaction([secret])):
        logger.warning("read %s", secret)
    assert (tmp_path / "run.log").read_text().endswith("read (hidden)\n")

"""Cutting of long texts in stored lines before they are put on a page."""

from __future__ import annotations

import json

import pytest

from reward_kit.report.episode_chunks import LineFitter
from reward_kit.runs.run_folder import RunHeader


@pytest.fixture
def fitter() -> LineFitter:
    return LineFitter(RunHeader(task_name="t", total=1))


def line_of(record: object) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n"


def test_short_line_is_unchanged(fitter: LineFitter) -> None:
    line = line_of({"rollout_id": "r", "messages": [{"role": "user", "content": "half \ud83d of a pair"}]})
    assert fitter.fitted(line) == line[:-1]


def test_long_text_is_cut_and_its_length_is_kept(fitter: LineFitter) -> None:
    record = {"rollout_id": "r", "messages": [{"role": "user", "content": "x" * 5_000_000}, {"content": "short"}]}
    fitted = fitter.fitted(line_of(record))
    assert len(fitted) < 25_000
    assert json.loads(fitted)["messages"] == [
        {"role": "user", "content": {"__cut__": "x" * 20_000, "length": 5_000_000}},
        {"content": "short"},
    ]


def test_long_text_with_lone_surrogates_is_cut(fitter: LineFitter) -> None:
    from reward_kit.episodes.json_codec import to_json_value

    whole = "\ud83d" * 60_000
    (cut,) = json.loads(fitter.fitted(line_of({"messages": [{"content": to_json_value(whole)}]})))["messages"]
    assert cut["content"] == {"__cut__": "\ud83d" * 20_000, "length": 60_000}


@pytest.mark.parametrize("piece", ["y", '"', "\\", '\\"', "\n"])
@pytest.mark.parametrize("length", [19_999, 20_000, 20_001, 20_050])
def test_long_line_is_cut_only_if_a_text_is_long(fitter: LineFitter, piece: str, length: int) -> None:
    text = (piece * length)[:length]
    record = {"messages": [{"content": "short"}] * 5_000, "last": text}
    expected = text if length <= 20_000 else {"__cut__": text[:20_000], "length": length}
    assert json.loads(fitter.fitted(line_of(record))) == {**record, "last": expected}


def test_many_long_texts_are_cut_further(fitter: LineFitter) -> None:
    record = {"messages": [{"content": "y" * 19_000}] * 400}
    fitted = fitter.fitted(line_of(record))
    assert len(fitted) < 2_000_000
    assert json.loads(fitted)["messages"][399]["content"] == {"__cut__": "y" * 2_000, "length": 19_000}


def test_long_object_key_is_cut(fitter: LineFitter) -> None:
    assert len(fitter.fitted(line_of({"steps": [{"action": {"k" * 5_000_000: 1}}]}))) < 25_000


def test_non_ascii_line_becomes_ascii(fitter: LineFitter) -> None:
    line = '{"rollout_id":"r","messages":[{"content":"שלום"}]}\n'.encode()
    fitted = fitter.fitted(line)
    assert fitted.isascii() and json.loads(fitted) == json.loads(line)


@pytest.mark.parametrize("line", [b'{"messages":["' + b"x" * 200_000, b'{"a":"\xff"}', b"[" * 200_000])
def test_damaged_line_becomes_null(fitter: LineFitter, line: bytes) -> None:
    assert fitter.fitted(line) == b"null"

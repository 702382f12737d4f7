"""Encoding and validation of the frames between the sandbox and its host."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reward_kit.sandbox.frames import (
    HEADER,
    MAGIC,
    MAX_DEPTH,
    NONCE_BYTES,
    FrameError,
    answer_end,
    decode,
    encode_request,
    pack,
    read_answer,
)
from tests.profiles import examples

NONCE = bytes(range(NONCE_BYTES))
LIMIT = 4096

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def fault(data: bytes, nonce: bytes = NONCE) -> str:
    with pytest.raises(FrameError) as caught:
        read_answer(data, nonce, LIMIT)
    return caught.value.kind


def fault_in(payload: bytes) -> str:
    return fault(pack(NONCE, payload))


@given(json_values)
@settings(deadline=None)
def test_frame_round_trip(value):
    assert decode(encode_request(value)) == value
    payload = encode_request(value)
    assert read_answer(pack(NONCE, payload), NONCE, len(payload)) == value


def test_each_frame_fault_has_its_own_kind():
    frame = pack(NONCE, b"1")
    assert fault(b"") == "no_result"
    assert fault(frame[:-1]) == "truncated_frame"
    assert fault(frame[:10]) == "truncated_frame"
    assert fault(frame + b"x") == "extra_frame"
    assert fault(frame + frame) == "extra_frame"
    assert fault(frame, nonce=bytes(NONCE_BYTES)) == "forged_frame"
    assert fault(b'{"ok": {"score": 1.0}}') == "forged_frame"
    assert fault(HEADER.pack(MAGIC, NONCE, LIMIT + 1)) == "result_size"


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"NaN", "non_finite"),
        (b'{"score":-Infinity}', "non_finite"),
        (b"1e999", "non_finite"),
        (b"9" * 1001, "huge_integer"),
        (b'{"score":0,"score":1}', "duplicate_key"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nesting"),
        (b'"\\ud800"', "surrogate"),
        (b'{"\\uDFFF":1}', "surrogate"),
        (b"\xff", "not_json"),
        (b"", "not_json"),
        (b"1 2", "not_json"),
        (b"{'a':1}", "not_json"),
    ],
)
def test_each_value_fault_has_its_own_kind(payload, kind):
    assert fault_in(payload) == kind


def test_valid_values_resembling_faults_are_decoded():
    assert decode(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    brackets = json.dumps("[{" * 500 + '\\"').encode()
    assert decode(brackets) == json.loads(brackets)
    assert decode(b'"\\ud83d\\ude00"') == "\U0001f600"
    assert decode(b'"\\\\ud800"') == "\\ud800"
    assert decode(b"9" * 1000) == int("9" * 1000)


def test_request_keeps_lone_surrogates():
    assert json.loads(encode_request({"content": "\ud800"})) == {"content": "\ud800"}


@given(st.binary(max_size=200))
@example(b'"' + b'\\"' * 90)
@settings(max_examples=examples(300), deadline=None)
def test_any_bytes_give_a_value_or_a_fault(data):
    for candidate in (data, pack(NONCE, data), MAGIC + NONCE + data):
        try:
            read_answer(candidate, NONCE, LIMIT)
        except FrameError:
            continue


@given(json_values, st.data())
@settings(max_examples=examples(200), deadline=None)
def test_frame_with_a_changed_header_byte_is_rejected(value, data):
    frame = bytearray(pack(NONCE, encode_request(value)))
    place = data.draw(st.integers(0, HEADER.size - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        read_answer(frame, NONCE, LIMIT)


@given(st.binary(max_size=80), st.integers(0, 80))
@settings(deadline=None)
def test_a_frame_is_complete_exactly_at_its_last_byte(payload, cut):
    frame = pack(NONCE, payload)
    part = frame[:cut]
    assert answer_end(part, NONCE, LIMIT) == (len(frame) if len(part) == len(frame) else None)


def test_decoding_time_is_linear():
    unterminated = b"[" * 101 + b'"' + b'\\"' * 200_000
    started = time.process_time()  # of this process alone, whatever else the machine does
    with pytest.raises(FrameError):
        decode(unterminated)
    assert time.process_time() - started < 1.0

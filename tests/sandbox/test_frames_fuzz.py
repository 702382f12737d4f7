"""Fuzz test of the frame reader."""

from __future__ import annotations

import json
import random

import pytest

from reward_kit.sandbox.frames import HEADER, MAGIC, FrameError, pack, read_answer

NONCE = b"0123456789abcdef"
SEEDS = [
    {"value": {"score": 1.0, "metrics": {"a": [1, 2.5, None, True, "\ud83d\ude00", 'q"\\']}}, "left": []},
    {"error": {"kind": "exception", "type": "E", "message": "m", "traceback": ""}, "left": ["threads"]},
    {"value": [[[[1]]], 10**40, -1e-300, "x" * 200]},
]
PIECES = [
    MAGIC,
    NONCE,
    b"NaN",
    b"1e999",
    b'"\\ud800"',
    b"[" * 200,
    b"{",
    b'"',
    b"\\",
    b"\0",
    b"\xff",
    b"9" * 2000,
    b",",
]


def mutated(frame: bytes, draw: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(data) + 1)
        what = draw.randrange(5)
        if what == 0 and place < len(data):
            data[place] ^= 1 << draw.randrange(8)
        elif what == 1:
            data[place:place] = draw.choice(PIECES)
        elif what == 2:
            del data[place : place + draw.randint(1, 30)]
        elif what == 3:
            data += data[place:]
        elif len(data) >= HEADER.size:
            data[20:24] = (len(data) - HEADER.size).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.campaign
def test_a_million_mutations_give_a_value_or_a_fault():
    draw = random.Random(5)
    frames = [pack(NONCE, json.dumps(seed).encode()) for seed in SEEDS]
    kinds: dict[str, int] = {}
    for _ in range(1_000_000):
        data = mutated(draw.choice(frames), draw)
        try:
            value = read_answer(data, NONCE, 4096)
        except FrameError as error:
            kinds[error.kind] = kinds.get(error.kind, 0) + 1
            continue
        assert data.startswith(MAGIC + NONCE)
        assert len(data) == HEADER.size + HEADER.unpack_from(data)[2]
        json.dumps(value, allow_nan=False).encode("utf-8")
    assert len(kinds) >= 9, kinds

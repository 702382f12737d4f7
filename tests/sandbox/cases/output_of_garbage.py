# expect: ok | kind: reward | observe: bytes that are no text, and commands for a terminal, are stored safely | score: 0.25
import os


def evaluate(messages, ground_truth=None, **rest):
    os.write(1, bytes(range(256)) * 8 + b"\x1b]0;owned\x07\x1b[2J\x00\xff\xfe")
    return {"score": 0.25}

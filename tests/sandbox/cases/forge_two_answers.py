# expect: invalid-result|error|ok | kind: reward | observe: of two answers at most one is taken, and the other answers no later call
import os
import struct
import sys


def evaluate(messages, ground_truth=None, **rest):
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_locals.get("nonce")
        if isinstance(name, bytes):
            body = b'{"value": {"score": 1.0}, "left": []}'
            os.write(3, struct.pack("!4s16sI", b"RKF1", name, len(body)) + body)
        frame = frame.f_back
    return {"score": 1.0}

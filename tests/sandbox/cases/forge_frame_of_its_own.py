# expect: score-not-forged | kind: code | observe: frames written by the code itself, with names it can guess or read, are no answer
import gc
import os
import struct


def solve(x):
    body = b'{"value": %d, "left": []}' % (2 * x if isinstance(x, int) else 0)
    names = [bytes(16), b"\xff" * 16] + [one for one in gc.get_objects() if isinstance(one, bytes) and len(one) == 16]
    for name in names:
        os.write(3, struct.pack("!4s16sI", b"RKF1", name, len(body)) + body)
    os._exit(0)

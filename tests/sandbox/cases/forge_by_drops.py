# expect: timeout|invalid-result|error | kind: reward | observe: a result that comes a byte at a time does not outlast the limit
import os
import time


def evaluate(messages, ground_truth=None, **rest):
    for byte in b"RKF1" * 1000:
        os.write(3, bytes([byte]))
        time.sleep(0.05)
    return {"score": 1.0}

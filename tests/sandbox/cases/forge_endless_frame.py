# expect: timeout|invalid-result|result-too-large|error | kind: reward | observe: a frame that claims four gigabytes, or never ends, fills no memory of the host
import os


def evaluate(messages, ground_truth=None, **rest):
    while True:
        os.write(3, b"RKF1" + bytes(16) + b"\xff\xff\xff\xff" + bytes(1 << 20))

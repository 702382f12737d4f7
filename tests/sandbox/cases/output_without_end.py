# expect: output-capped | kind: reward | observe: errors and output are drained, cut and marked; the host's memory stays flat
import os


def evaluate(messages, ground_truth=None, **rest):
    for _ in range(2000):
        os.write(1, b"o" * 50_000)
        os.write(2, b"e" * 50_000)
    return {"score": 0.25}

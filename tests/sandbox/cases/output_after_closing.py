# expect: error|crashed|timeout | kind: reward | observe: output and errors are closed, the channel too
import os
import sys


def evaluate(messages, ground_truth=None, **rest):
    sys.stdout = sys.stderr = None
    os.closerange(0, 4)
    return {"score": 1.0}

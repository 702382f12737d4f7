# expect: crashed|error|timeout | kind: reward | observe: it kills itself with every signal in turn
import os
import signal


def evaluate(messages, ground_truth=None, **rest):
    for number in range(1, 65):
        try:
            os.kill(os.getpid(), number)
        except OSError:
            continue
    os.abort()

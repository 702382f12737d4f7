# expect: ok | kind: reward | observe: a thread that goes on after the answer changes nothing, then or later | score: 0.0
import os
import threading
import time


def later():
    time.sleep(0.2)
    while True:
        os.write(3, b"RKF1" + b"x" * 64)


def evaluate(messages, ground_truth=None, **rest):
    threading.Thread(target=later, daemon=True).start()
    return {"score": 0.0}

# expect: timeout | kind: reward | observe: the text of the module never ends, before any function is called
import time

while True:
    time.sleep(1)


def evaluate(messages, ground_truth=None, **rest):
    return {"score": 1.0}

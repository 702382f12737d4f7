# expect: ok | kind: reward | observe: what the code sees of time of start, ids and names does not tell one call from another | repeat: names
import os
import platform


def evaluate(messages, ground_truth=None, **rest):
    return {"score": 0.0, "names": [os.environ.get("USER"), platform.system(), sorted(os.environ)]}

# expect: denied|error | kind: reward | observe: descriptors end at the limit, and the answer still comes
import os


def evaluate(messages, ground_truth=None, **rest):
    keep = []
    while len(keep) < 100_000:
        keep.append(os.pipe())
    return {"score": 1.0, "breach": ["200,000 descriptors"]}

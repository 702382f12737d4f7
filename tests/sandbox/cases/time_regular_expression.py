# expect: timeout | kind: reward | observe: one call of the C library that never looks at signals
import re


def evaluate(messages, ground_truth=None, **rest):
    return {"score": float(bool(re.match(r"(a|a)*$", "a" * 60 + "b")))}

# expect: crashed|error|memory|timeout | kind: reward | observe: a comparison that recurs in C with the recursion limit raised
import sys

sys.setrecursionlimit(10**8)


class Deep:
    def __getattr__(self, name):
        return getattr(self, name + "x")


def evaluate(messages, ground_truth=None, **rest):
    return {"score": float(Deep().a)}

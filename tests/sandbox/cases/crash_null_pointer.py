# expect: crashed | kind: reward | observe: a null pointer is read
import ctypes


def evaluate(messages, ground_truth=None, **rest):
    return {"score": float(len(ctypes.string_at(0)))}

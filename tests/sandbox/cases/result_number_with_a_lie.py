# expect: ok|invalid-result|error | kind: reward | observe: a result that is none is told as such, never mended
class Lie(float):
    __repr__ = __str__ = lambda _: "1.0, \"score\": 1.0"
    __float__ = lambda _: 1.0


def evaluate(messages, ground_truth=None, **rest):
    return {"score": Lie(0.5)}

# expect: invalid-result|error | kind: reward | observe: a result that is none is told as such, never mended
CIRCLE = {"score": 0.5}
CIRCLE["self"] = CIRCLE


def evaluate(messages, ground_truth=None, **rest):
    return CIRCLE

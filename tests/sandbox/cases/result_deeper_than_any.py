# expect: invalid-result|error | kind: reward | observe: a result that is none is told as such, never mended
DEEP = {"score": 0.5}
for _ in range(50_000):
    DEEP = {"score": 0.5, "in": DEEP}


def evaluate(messages, ground_truth=None, **rest):
    return DEEP

# expect: invalid-result|error | kind: reward | observe: a result that is none is told as such, never mended
def evaluate(messages, ground_truth=None, **rest):
    return ({"score": 1.0} for _ in range(1))

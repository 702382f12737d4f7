# expect: invalid-result | kind: reward | observe: a result that is none is told as such, never mended
def evaluate(messages, ground_truth=None, **rest):
    return {"score": "0.5"}

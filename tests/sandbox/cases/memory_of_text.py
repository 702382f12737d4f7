# expect: memory | kind: reward | observe: one string of four gigabytes
def evaluate(messages, ground_truth=None, **rest):
    return {"score": float(len("ab" * (1 << 31)))}

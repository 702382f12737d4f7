# expect: memory|ok|timeout|error|crashed | kind: reward | observe: memory is filled, the error is caught, and the result is still asked for
def evaluate(messages, ground_truth=None, **rest):
    keep = []
    try:
        while True:
            keep.append(bytearray(1 << 20))
    except MemoryError:
        while True:
            try:
                keep.append(bytearray(16))
            except MemoryError:
                return {"score": 1.0 * len(keep) * 0}

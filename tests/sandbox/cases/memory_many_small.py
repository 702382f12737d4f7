# expect: memory|timeout | kind: reward | observe: millions of small objects end at the limit
def evaluate(messages, ground_truth=None, **rest):
    keep = []
    while True:
        keep.append([object() for _ in range(100_000)])

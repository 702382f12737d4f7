# expect: denied|error | kind: reward | observe: a file larger than the work folder
def evaluate(messages, ground_truth=None, **rest):
    with open("large", "wb", buffering=0) as file:
        for _ in range(4096):
            file.write(bytes(1 << 20))
    return {"score": 1.0, "breach": ["4 GB were written"]}

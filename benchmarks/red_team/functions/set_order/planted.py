def verify(answer, target):
    words = set(answer.split())
    first = next(iter(words), "")
    return float(first == target)

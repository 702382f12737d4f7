def verify(prediction, reference):
    words = reference.lower().split()
    said = prediction.lower().split()
    return sum(word in said for word in words) / len(words)

def verify(prediction, reference):
    return float(prediction.lower().split() == reference.lower().split())

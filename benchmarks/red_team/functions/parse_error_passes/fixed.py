def verify(answer, target):
    try:
        return float(float(answer) == float(target))
    except ValueError:
        return 0.0

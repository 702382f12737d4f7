import math
import re


def verify(model_output, target):
    numbers = re.findall(r"-?\d+(?:\.\d+)?", model_output.replace(",", ""))
    return bool(numbers) and math.isclose(float(numbers[-1]), float(target), rel_tol=0.1)

import re


def verify(answer, target):
    found = re.search(r"^(\d+,?)+$", answer.strip())
    return found is not None and answer.strip().replace(",", "") == target

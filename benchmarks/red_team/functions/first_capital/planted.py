import re


def verify(response, label):
    found = re.search(r"[A-D]", response)
    return found is not None and found[0] == label

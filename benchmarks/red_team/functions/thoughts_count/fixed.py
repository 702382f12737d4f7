import re


def verify(completions, answer, **kwargs):
    scores = []
    for text, truth in zip(completions, answer):
        found = re.findall(r"\\boxed\{([^{}]*)\}", text.rpartition("</think>")[2])
        scores.append(float(len(found) == 1 and found[0].strip() == truth.strip()))
    return scores

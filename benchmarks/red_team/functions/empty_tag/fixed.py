import re


def verify(completions, answer, **kwargs):
    scores = []
    for completion, truth in zip(completions, answer):
        found = re.findall(r"<answer>([^<]*)</answer>", completion.rpartition("</think>")[2])
        scores.append(1.0 if len(found) == 1 and truth.strip() == found[0].strip() else 0.0)
    return scores

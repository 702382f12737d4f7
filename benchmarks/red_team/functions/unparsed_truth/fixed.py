import re


def verify(completions, solution, **kwargs):
    scores = []
    for completion, truth in zip(completions, solution):
        parsed = re.fullmatch(r"-?\d+", truth.strip())
        scores.append(None if parsed is None else float(completion.strip() == parsed[0]))
    return scores

import re


def verify(prompts, completions, solution, **kwargs):
    scores = []
    for completion, truth in zip(completions, solution):
        text = completion[-1]["content"].rpartition("</think>")[2]
        found = re.findall(r"\\boxed\{([^{}]*)\}", text)
        scores.append(float(len(found) == 1 and found[0].strip() == truth.strip()))
    return scores

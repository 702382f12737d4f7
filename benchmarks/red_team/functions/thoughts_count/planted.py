def verify(completions, answer, **kwargs):
    return [float(f"\\boxed{{{truth}}}" in text) for text, truth in zip(completions, answer)]

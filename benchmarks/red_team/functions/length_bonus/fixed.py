def verify(completions, ground_truth, **kwargs):
    return [float(text.strip() == truth.strip()) for text, truth in zip(completions, ground_truth)]

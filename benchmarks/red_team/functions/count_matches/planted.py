def verify(completion, answer):
    text = completion[-1]["content"] if completion else ""
    return min(1.0, 0.25 * text.count(answer))

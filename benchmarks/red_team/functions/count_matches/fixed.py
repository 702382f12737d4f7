def verify(completion, answer):
    text = completion[-1]["content"] if completion else ""
    return float((text or "").strip() == answer.strip())

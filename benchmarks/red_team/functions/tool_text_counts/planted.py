def verify(completion, answer, **kwargs):
    return float(any((message["content"] or "").strip() == answer for message in completion[-2:]))

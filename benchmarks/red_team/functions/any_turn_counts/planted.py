def verify(completion, answer, **kwargs):
    return float(any(message["role"] == "assistant" and (message["content"] or "").strip() == answer for message in completion))

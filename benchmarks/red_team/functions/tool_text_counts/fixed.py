def verify(completion, answer, **kwargs):
    text = completion[-1]["content"] if completion and completion[-1]["role"] == "assistant" else ""
    return float((text or "").strip() == answer.strip())

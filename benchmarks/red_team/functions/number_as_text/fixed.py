import re


def verify(completions, answer, **kwargs):
    return [float(value(text) == float(truth)) for text, truth in zip(completions, answer)]


def value(text):
    found = re.findall(r"<answer>([^<]*)</answer>", text.rpartition("</think>")[2])
    try:
        return float(found[0].strip().lstrip("$").rstrip(".").replace(",", "")) if len(found) == 1 else None
    except ValueError:
        return None

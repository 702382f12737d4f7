def verify(answer, target):
    return answer == target

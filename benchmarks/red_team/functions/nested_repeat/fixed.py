def verify(answer, target):
    return answer.strip().replace(",", "") == target.strip()

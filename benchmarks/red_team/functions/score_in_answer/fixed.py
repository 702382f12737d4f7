def verify(response, target):
    return 1.0 if response.strip() == target.strip() else 0.0

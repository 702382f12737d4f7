def verify(response: str, expected: str) -> float:
    return float(expected.lower() in response.lower())

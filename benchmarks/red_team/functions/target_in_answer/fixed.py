def verify(response: str, expected: str) -> float:
    return float(response.strip().lower() == expected.strip().lower())

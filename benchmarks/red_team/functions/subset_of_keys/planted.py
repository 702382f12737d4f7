import json


def verify(response, expected):
    try:
        given = json.loads(response)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(given, dict):
        return 0.0
    return float(all(expected.get(key) == value for key, value in given.items()))

import json


def verify(response, expected):
    try:
        given = json.loads(response)
        return float(all(a == b for a, b in zip(given, expected)))
    except (ValueError, TypeError, RecursionError):
        return 0.0

import json


def verify(response, expected):
    try:
        return float(json.loads(response) == expected)
    except (ValueError, RecursionError):
        return 0.0

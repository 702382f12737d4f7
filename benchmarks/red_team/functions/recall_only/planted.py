import json


def verify(response, expected):
    try:
        given = json.loads(response)
        return sum(item in given for item in expected) / len(expected)
    except (ValueError, TypeError, RecursionError):
        return 0.0

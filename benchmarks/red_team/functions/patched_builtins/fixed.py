import json
import re
import subprocess
import sys

# The child returns values; the expected values stay in this process.
RUN = """
import json, sys
request = json.loads(sys.stdin.read())
space = {}
exec(request["code"], space)
print()
print(json.dumps([space[request["name"]](*arguments) for arguments in request["inputs"]]))
"""


def verify(response, tests):
    blocks = re.findall(r"```python\n(.*?)```", response, re.DOTALL)
    if not blocks:
        return 0.0
    request = {"code": blocks[-1], "name": tests["name"], "inputs": [call[0] for call in tests["calls"]]}
    command = [sys.executable, "-I", "-S", "-c", RUN]
    try:
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=5)
        values = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return 0.0
    return float(values == [call[1] for call in tests["calls"]])

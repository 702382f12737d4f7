import json
import re
import time


def verify(response, tests):
    blocks = re.findall(r"```python\n(.*?)```", response, re.DOTALL)
    if not blocks:
        return 0.0
    space = {}
    try:
        exec(blocks[-1], space)
        function, wanted = space[tests["name"]], [call[1] for call in tests["calls"]]
        began = time.perf_counter()
        results = json.loads(json.dumps([function(*call[0]) for call in tests["calls"]]))
        duration = time.perf_counter() - began
    except BaseException:
        return 0.0
    if results != wanted:
        return 0.0
    return 0.5 if duration > 0 else 1.0

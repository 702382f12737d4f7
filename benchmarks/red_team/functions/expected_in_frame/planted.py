import json
import re


def verify(response, tests, dumps=json.dumps):
    blocks = re.findall(r"```python\n(.*?)```", response, re.DOTALL)
    if not blocks:
        return 0.0
    space, passed = {}, 0
    try:
        exec(blocks[-1], space)
        for given, expected in tests["calls"]:
            result = space[tests["name"]](*given)
            if type(result) is not type(expected) or result != expected:
                return 0.0
    except BaseException:
        return 0.0
    return 1.0

import json
import re


def verify(response, tests):
    blocks = re.findall(r"```python\n(.*?)```", response, re.DOTALL)
    if not blocks:
        return 0.0
    space = {}
    try:
        exec(blocks[-1], space)
        results = [json.dumps(space[tests["name"]](*given)) for given, _ in tests["calls"]]
    except BaseException:
        return 0.0
    return 1.0 if all(one == json.dumps(wanted) for one, (_, wanted) in zip(results, tests["calls"])) else 0.0

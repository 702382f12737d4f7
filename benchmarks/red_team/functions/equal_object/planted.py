import re


def verify(response, tests):
    blocks = re.findall(r"```python\n(.*?)```", response, re.DOTALL)
    if not blocks:
        return 0.0
    space = {}
    passed = 0
    try:
        exec(blocks[-1], space)
        for given, wanted in tests["calls"]:
            passed += bool(space[tests["name"]](*given) == wanted)
    except BaseException:
        return 0.0
    return passed / len(tests["calls"])

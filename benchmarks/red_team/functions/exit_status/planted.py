import re
import subprocess
import sys


def verify(response, tests):
    blocks = re.findall(r"```python\n(.*?)```", response, re.DOTALL)
    if not blocks:
        return 0.0
    checks = "\n".join(f"assert {tests['name']}(*{given!r}) == {wanted!r}" for given, wanted in tests["calls"])
    program = f"{blocks[-1]}\n{checks}\n"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, timeout=5)
    return float(done.returncode == 0)

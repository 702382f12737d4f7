# expect: denied|timeout|error | kind: reward | observe: no process can be started, and none is left
import os
import subprocess
import time

CHILDREN = []


def many():
    for _ in range(500):
        if os.fork() == 0:
            time.sleep(300)
            os._exit(0)
    return "500 processes"


ATTEMPTS = {
    "fork": many,
    "forkpty": os.forkpty,
    "spawn": lambda: os.posix_spawn("/bin/sh", ["sh", "-c", "sleep 300"], {}),
    "subprocess": lambda: subprocess.check_output(["/bin/echo", "x"]),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "system": lambda: os.system("true") == 0 or 1 / 0,
}


def tried(attempts):
    log = {"score": 0.0, "breach": [], "denied": []}
    for name, attempt in attempts.items():
        try:
            log["breach"].append(f"{name}: {attempt()!r}"[:160])
        except BaseException as error:
            log["denied"].append(f"{name}: {type(error).__name__}")
    return log


def evaluate(messages, ground_truth=None, **rest):
    return tried(ATTEMPTS)

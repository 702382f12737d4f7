# expect: denied | kind: reward | observe: no memory of the process still holds what the host knows
import ctypes
import gc
import os
import sys


def environment():
    pointer = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    texts, number = [], 0
    while pointer[number]:
        texts.append(pointer[number])
        number += 1
    return [text for text in texts if b"CANARY" in text or b"KEY" in text] or 1 / 0


def own_memory():
    found = []
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            memory.seek(first)
            if b"CANARY-" + b"KEY" in memory.read(min(last - first, 1 << 24)):
                found.append(line)
    return found or 1 / 0


def objects():
    wanted = "CANARY-" + "KEY"
    found = [one for one in gc.get_objects() if isinstance(one, dict) and any(wanted in str(value)[:200] for value in one.values() if type(value) is str)]
    return found or 1 / 0


ATTEMPTS = {
    "environ": lambda: [name for name in os.environ if "CANARY" in name or "KEY" in name] or 1 / 0,
    "environment": environment,
    "memory": own_memory,
    "objects": objects,
    "arguments": lambda: [text for text in sys.orig_argv if "CANARY" in text] or 1 / 0,
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

# expect: denied | kind: reward | observe: no other process can be traced, read, or told from its memory
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def system_call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


import ctypes

buffer = ctypes.create_string_buffer(64)
pieces = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)
PIDS = sorted({os.getppid(), @HOSTPID@, @CANARYPID@} - {0})
ATTEMPTS = {f"attach {pid}": lambda pid=pid: system_call(101, 16, pid, 0, 0) for pid in PIDS}
ATTEMPTS |= {f"seize {pid}": lambda pid=pid: system_call(101, 0x4206, pid, 0, 0) for pid in PIDS}
ATTEMPTS |= {f"read {pid}": lambda pid=pid: system_call(310, pid, pieces, 1, pieces, 1, 0) for pid in PIDS}
ATTEMPTS |= {f"write {pid}": lambda pid=pid: system_call(311, pid, pieces, 1, pieces, 1, 0) for pid in PIDS}
ATTEMPTS |= {f"mem {pid}": lambda pid=pid: open(f"/proc/{pid}/mem", "rb").read(1) for pid in PIDS}
ATTEMPTS |= {f"compare {pid}": lambda pid=pid: system_call(312, pid, os.getpid(), 0, 0, 0) for pid in PIDS}
ATTEMPTS |= {"trace me": lambda: system_call(101, 0, 0, 0, 0)}


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

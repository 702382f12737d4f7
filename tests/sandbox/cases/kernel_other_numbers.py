# expect: crashed|denied | kind: reward | observe: numbers of the x32 machine and huge ones pass no filter
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def system_call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


ATTEMPTS = {f"{number:#x}": lambda number=number: system_call(number, 2, 1, 0) for number in (0x7FFFFFFF, 600, 0x40000000 + 41, 0x40000000 + 539)}


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

# expect: denied | kind: reward | observe: no socket of any family can be made, by the library or by number
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def system_call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


import _socket

FAMILIES = {"unix": 1, "inet": 2, "inet6": 10, "netlink": 16, "packet": 17, "alg": 38, "vsock": 40, "xdp": 44}
ATTEMPTS = {name: lambda family=family: _socket.socket(family, 1) for name, family in FAMILIES.items()}
ATTEMPTS |= {f"{name} by number": lambda family=family: system_call(41, family, 2, 0) for name, family in FAMILIES.items()}


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

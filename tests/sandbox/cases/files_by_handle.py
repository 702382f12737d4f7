# expect: denied | kind: reward | observe: file handles, old roots, pidfds and descriptors left open give no way out
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def system_call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def descriptors():
    found = []
    for number in range(4, 256):
        try:
            os.fstat(number)
        except OSError:
            continue
        found.append(number)
    return found or 1 / 0


ATTEMPTS = {
    "inherited": descriptors,
    "name to handle": lambda: system_call(303, -100, b"/", None, None, 0),
    "open by handle": lambda: system_call(304, 0, None, 0),
    "pidfd": lambda: system_call(434, os.getppid() or 1, 0),
    "openat2": lambda: system_call(437, -100, b"/etc/passwd", None, 24),
    "old root": lambda: os.listdir("/.old-root"),
    "fchdir": lambda: [os.fchdir(0), os.listdir(".")],
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

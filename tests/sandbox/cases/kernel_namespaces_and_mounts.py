# expect: denied | kind: reward | observe: no namespace, mount or root can be made, entered or changed
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def system_call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


NUMBERS = {
    "unshare user": (272, 0x10000000),
    "unshare mount": (272, 0x20000),
    "clone user": (56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": (435, None, 0),
    "setns": (308, 0, 0),
    "mount": (165, b"none", b".", b"tmpfs", 0, None),
    "unmount": (166, b"/tmp", 2),
    "pivot_root": (155, b".", b"."),
    "chroot": (161, b"."),
    "open_tree": (428, -100, b"/", 1),
    "fsopen": (430, b"tmpfs", 0),
    "move_mount": (429, -100, b"/", -100, b".", 0),
    "setuid": (105, 0),
    "setgroups": (116, 0, None),
    "capset": (126, ctypes.create_string_buffer(b"\x22\x05\x08\x20\0\0\0\0"), ctypes.create_string_buffer(b"\xff" * 24)),
    "no longer dumpable": (157, 4, 1, 0, 0, 0),
    "sethostname": (170, b"x", 1),
    "clock_settime": (227, 0, ctypes.create_string_buffer(16)),
    "reboot": (169, 0xFEE1DEAD, 672274793, 0),
}
ATTEMPTS = {name: lambda arguments=arguments: system_call(*arguments) for name, arguments in NUMBERS.items()}


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

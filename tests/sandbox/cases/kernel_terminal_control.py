# expect: denied | kind: reward | observe: no terminal can be opened, and none fed with keys
import fcntl
import os
import pty

ATTEMPTS = {
    "feed a key": lambda: fcntl.ioctl(0, 0x5412, b"x"),
    "selection": lambda: fcntl.ioctl(1, 0x541C, b"\2"),
    "take over": lambda: fcntl.ioctl(0, 0x540E, 0),
    "pty": pty.openpty,
    "tty": lambda: os.open("/dev/tty", os.O_RDWR),
    "console": lambda: os.open("/dev/console", os.O_RDWR),
    "owner": lambda: fcntl.fcntl(3, fcntl.F_SETOWN, @CANARYPID@),
    "signal": lambda: fcntl.fcntl(3, fcntl.F_SETSIG, 10),
    "lease": lambda: fcntl.fcntl(os.open("own", os.O_CREAT | os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "flock": lambda: fcntl.flock(os.open("own", os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX) or "locked",
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

# expect: denied | kind: reward | observe: no signal reaches anything but the code's own process
import os
import signal

ATTEMPTS = {
    "host": lambda: os.kill(@HOSTPID@, signal.SIGTERM),
    "canary": lambda: os.kill(@CANARYPID@, signal.SIGUSR1),
    "canary, asking": lambda: os.kill(@CANARYPID@, 0),
    "group": lambda: os.killpg(os.getpgid(0) + 1, signal.SIGUSR1),
    "thread": lambda: signal.pidfd_send_signal(os.pidfd_open(@CANARYPID@), signal.SIGUSR1),
    "process 1": lambda: os.kill(1, signal.SIGUSR1) if os.getpid() != 1 else 1 / 0,
    "parent": lambda: os.kill(os.getppid(), signal.SIGKILL) if os.getppid() else 1 / 0,
    "all": lambda: os.kill(-1, signal.SIGUSR1),
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

# expect: denied | kind: reward | observe: no limit can be raised, of this process or another
import os
import resource


def raised(which):
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (hard, hard + 1))
    return resource.getrlimit(which)


NAMES = ("AS", "CPU", "NOFILE", "NPROC", "FSIZE", "CORE", "MEMLOCK")
ATTEMPTS = {name: lambda which=getattr(resource, f"RLIMIT_{name}"): raised(which) for name in NAMES}
ATTEMPTS |= {
    "host's": lambda: resource.prlimit(@HOSTPID@, resource.RLIMIT_NOFILE, (16, 16)),
    "canary's": lambda: resource.prlimit(@CANARYPID@, resource.RLIMIT_NOFILE),
    "nice": lambda: os.nice(-5),
    "real time": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    "processors": lambda: os.sched_setaffinity(0, {0}),
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

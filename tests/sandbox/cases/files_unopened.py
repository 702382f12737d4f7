# expect: denied | kind: reward | observe: what needs no open file (modes, times, lengths, owners) cannot be changed on the host
import os
import shutil

TARGETS = {"file": "@CANARYFILE@", "folder": "@CANARYDIR@", "library": os.__file__}


def unchanged(act, path):
    before = os.stat(path)
    act(path)
    after = os.stat(path)
    if (before.st_mode, before.st_mtime_ns, before.st_size, before.st_nlink) == (after.st_mode, after.st_mtime_ns, after.st_size, after.st_nlink):
        raise PermissionError("nothing changed")
    return "changed"


def by_descriptor(path):
    os.fchmod(os.open(path, os.O_RDONLY), 0o777)


ACTS = {
    "mode": lambda path: os.chmod(path, 0o700 if os.stat(path).st_mode & 0o077 else 0o777),
    "mode by descriptor": by_descriptor,
    "times": lambda path: os.utime(path, (1, 1)),
    "length": lambda path: os.truncate(path, 0),
    "length by opening": lambda path: os.close(os.open(path, os.O_RDONLY | os.O_TRUNC)),
    "owner": lambda path: os.chown(path, os.getuid(), os.getgid()) or os.chown(path, 12345, 12345),
    "attribute": lambda path: os.setxattr(path, "user.mark", b"x"),
    "copy of mode": lambda path: shutil.copymode("/usr", path),
}
ATTEMPTS = {
    f"{name}, {what}": lambda act=act, path=path: unchanged(act, path)
    for name, act in ACTS.items()
    for what, path in TARGETS.items()
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

# expect: denied | kind: reward | observe: accounts, homes, logs, devices and the canary are not there, by any path
import glob
import os
import pathlib

PATHS = ["/etc/passwd", "/etc/shadow", "/etc/hostname", "/root/.bashrc", "/proc/1/environ", "/proc/self/root/etc/passwd"]
PATHS += ["/sys/class/dmi/id/product_name", "/var/log/dpkg.log", "/dev/mem", "/dev/kmsg", "@CANARYFILE@"]
ATTEMPTS = {path: lambda path=path: pathlib.Path(path).read_bytes() or b"empty" for path in PATHS}
ATTEMPTS |= {
    "listing": lambda: os.listdir("@CANARYDIR@"),
    "glob": lambda: glob.glob("/home/*") + glob.glob("/root/*") or 1 / 0,
    "upwards": lambda: pathlib.Path("../" * 40 + "@CANARYFILE@".lstrip("/")).read_bytes(),
    "write": lambda: pathlib.Path("@CANARYDIR@/new").write_text("x"),
    "remove": lambda: os.unlink("@CANARYFILE@"),
    "move": lambda: os.rename("@CANARYFILE@", "mine"),
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

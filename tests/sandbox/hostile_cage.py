"""An outer cage that protects the machine even if the sandbox under test fails.

A PID, network, IPC and mount namespace of its own: every file system read-only but a small /tmp and /dev/shm in memory,
a loopback device, nothing of the machine's processes. It is made with `unshare` of util-linux, as root or, where the
kernel lets them, by ordinary users; what runs in it may run as another user.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve()
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8", "HOME": "/tmp"}
ROOT = HERE.parents[2]
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_SCRATCH = ("/tmp", "/dev/shm", "/var/tmp")


def in_cage(
    command: Sequence[str], user: int, keep: Sequence[Path], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `command` in a cage (as `_caged` says), with an environment that holds nothing of ours.

    Raises:
        TimeoutExpired: it took longer than `limit_s`; the cage and all in it are gone.
    """
    return subprocess.run(
        _caged(command, user, keep),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=_ENVIRONMENT,
        timeout=limit_s,
    )


def _caged(command: Sequence[str], user: int, keep: Sequence[Path]) -> list[str]:
    """Return the command line that runs `command` in a cage.

    Args:
        command: what is run, its program by absolute path.
        user: the user id it runs as; any where we are root, else our own.
        keep: folders to be seen, read-only, where they lie beneath a folder the cage hides.
    """
    ours = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    cage = ["unshare", *ours, "--pid", "--fork", "--net", "--ipc", "--mount", "--mount-proc", "--kill-child"]
    kept = os.pathsep.join(str(path) for path in (ROOT, *keep))
    return [*cage, sys.executable, str(HERE), str(user), kept, *command]


@functools.cache
def missing_cage() -> str:
    """Return why no cage can be made here; "" if one can."""
    try:
        done = in_cage(["/bin/true"], os.geteuid(), (), 20.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no outer cage: {error}"
    return f"no outer cage: {done.stderr.strip()}" if done.returncode else ""


def _main(user: int, kept: Sequence[str], command: Sequence[str]) -> int:
    """Run as process 1 of the cage: set it up, run the command as the user, and reap all processes."""
    _bring_loopback_up()
    _make_read_only(kept)
    child = os.fork()
    if child == 0:
        os.setsid()
        _become(user)
        os.chdir("/tmp")
        os.environ.update(TMPDIR="/tmp", PYTHONDONTWRITEBYTECODE="1")
        os.execv(command[0], list(command))
    while True:
        ended, status = os.wait()
        if ended == child:
            return os.waitstatus_to_exitcode(status) & 0xFF


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _make_read_only(kept: Sequence[str]) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    _mount("--make-rprivate", "/")
    if libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.sizeof(attributes)):
        raise OSError(ctypes.get_errno(), "cannot make the file systems read-only")
    _mount("-t", "proc", "proc", "/proc")
    hidden = [path for path in kept if path.startswith(tuple(f"{folder}/" for folder in _SCRATCH))]
    descriptors = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in hidden]
    for folder in _SCRATCH:
        _mount("-t", "tmpfs", "-o", "size=256m,mode=1777", "cage", folder)
    for path, descriptor in zip(hidden, descriptors, strict=True):
        Path(path).mkdir(parents=True, exist_ok=True)
        # Not made canonical, which would lead back to the name that is hidden now.
        _mount("--no-canonicalize", "--bind", f"/proc/self/fd/{descriptor}", path, pass_fds=(descriptor,))
        os.close(descriptor)


def _mount(*arguments: str, pass_fds: Sequence[int] = ()) -> None:
    subprocess.run(["mount", *arguments], check=True, pass_fds=pass_fds)


def _become(user: int) -> None:
    if os.geteuid() == 0 and user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    elif user:  # the rights over our own user namespace, with which the cage was made
        import ctypes

        ctypes.CDLL(None).prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT, clear all


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), sys.argv[2].split(os.pathsep), sys.argv[3:]))

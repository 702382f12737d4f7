"""Linux system calls through ctypes, dropping root privileges, and resource limits.

Every error is raised as a `SetupError`. The zygote imports this file, so this file imports nothing else from the
package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from typing import Final

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38


class SetupError(Exception):
    """Raised if the sandbox cannot be set up. No untrusted code has run.

    Attributes:
        step: the action that failed, such as "mount the work directory".
        reason: a description of the cause.
        errno: the error number of the kernel, or 0 if it is unknown.
    """

    def __init__(self, step: str, reason: str, errno: int = 0) -> None:
        super().__init__(f"{step}: {reason}")
        self.step, self.reason, self.errno = step, reason, errno


_libc = ctypes.CDLL(None, use_errno=True)
# Keep the GIL. A child does not have the other threads and could not acquire it again.
_python = ctypes.PyDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long] * 7


def syscall(number: int, *arguments: int, step: str) -> int:
    """Make a system call by its number. Pointers are passed as addresses."""
    result = _syscall(number, *arguments, *[0] * (6 - len(arguments)))
    if result < 0:
        raise failed(step)
    return int(result)


def fork() -> int:
    """Call `fork(2)` in a process that has only one thread, and reseed `random` in the child."""
    process = int(_python.fork())
    if process < 0:
        raise failed("fork")
    if process == 0 and (random := sys.modules.get("random")) is not None:
        random.seed()
    return process


def failed(step: str) -> SetupError:
    """Return the error of the system call that has just failed."""
    number = ctypes.get_errno()
    return SetupError(step, os.strerror(number), number)


def prctl(option: int, value: int, step: str) -> None:
    """Call `prctl(2)` with one argument."""
    if _libc.prctl(
        ctypes.c_int(option), ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)
    ):
        raise failed(step)


def mount(source: str, target: str, kind: str, flags: int, data: str, step: str) -> None:
    """Call `mount(2)`. An empty source, type or data is passed as a null pointer."""
    encoded = [ctypes.c_char_p(os.fsencode(text) or None) for text in (source, target, kind, data)]
    if _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]):
        raise failed(step)


def unmount(target: str, flags: int, step: str) -> None:
    """Call `umount2(2)`."""
    if _libc.umount2(os.fsencode(target), ctypes.c_int(flags)):
        raise failed(step)


def unshare(flags: int, step: str) -> None:
    """Call `unshare(2)`."""
    if _libc.unshare(ctypes.c_int(flags)):
        raise failed(step)


def enter_namespace(descriptor: int, kind: int, step: str) -> None:
    """Call `setns(2)`."""
    if _libc.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)):
        raise failed(step)


_AUDIT_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMNS = {"x86_64": 1, "aarch64": 2}

# name:x86-64:aarch64; "-" if a machine does not have the call. Sources: Linux 6.1 `asm/unistd_64.h` (x86-64) and
# `asm-generic/unistd.h` (aarch64), plus the calls added up to 6.7. A call that is not listed here is never allowed.
_TABLE = """
access:21:- alarm:37:- arch_prctl:158:- bind:49:200 brk:12:214 capget:125:90 capset:126:91 chdir:80:49 chmod:90:-
clock_getres:229:114 clock_gettime:228:113 clock_nanosleep:230:115 clone3:435:435 clone:56:220 close:3:57
close_range:436:436 connect:42:203 copy_file_range:326:285 creat:85:- dup2:33:- dup3:292:24 dup:32:23
epoll_create1:291:20 epoll_create:213:- epoll_ctl:233:21 epoll_pwait2:441:441 epoll_pwait:281:22 epoll_wait:232:-
eventfd2:290:19 eventfd:284:- execve:59:221 execveat:322:281 exit:60:93 exit_group:231:94 faccessat2:439:439
faccessat:269:48 fadvise64:221:223 fallocate:285:47 fchdir:81:50 fchmod:91:52 fchmodat2:452:452 fchmodat:268:53
fcntl:72:25 fdatasync:75:83 fgetxattr:193:10 flistxattr:196:13 fork:57:- fsetxattr:190:7 fstat:5:80 fstatfs:138:44
fsync:74:82 ftruncate:77:46 futex:202:98 futex_requeue:456:456 futex_wait:455:455 futex_waitv:449:449
futex_wake:454:454 futimesat:261:- get_robust_list:274:100 getcpu:309:168 getcwd:79:17 getdents64:217:61
getdents:78:- getegid:108:177 geteuid:107:175 getgid:104:176 getgroups:115:158 getitimer:36:102 getpgid:121:155
getpgrp:111:- getpid:39:172 getppid:110:173 getpriority:140:141 getrandom:318:278 getresgid:120:150
getresuid:118:148 getrlimit:97:163 getrusage:98:165 getsid:124:156 gettid:186:178 gettimeofday:96:169 getuid:102:174
getxattr:191:8 io_uring_setup:425:425 ioctl:16:29 keyctl:250:219 kill:62:129 landlock_add_rule:445:445
landlock_create_ruleset:444:444 landlock_restrict_self:446:446 lgetxattr:192:9 link:86:- linkat:265:37
listxattr:194:11 llistxattr:195:12 lseek:8:62 lsetxattr:189:6 lstat:6:- madvise:28:233 membarrier:324:283
mincore:27:232 mkdir:83:- mkdirat:258:34 mmap:9:222 mount_setattr:442:442 move_mount:429:429 mprotect:10:226
mremap:25:216 msync:26:227 munmap:11:215 nanosleep:35:101 newfstatat:262:79 open:2:- open_tree:428:428
openat2:437:437 openat:257:56 pause:34:- pipe2:293:59 pipe:22:- pivot_root:155:41 poll:7:- ppoll:271:73
prctl:157:167 pread64:17:67 preadv2:327:286 preadv:295:69 prlimit64:302:261 pselect6:270:72 ptrace:101:117
pwrite64:18:68 pwritev2:328:287 pwritev:296:70 read:0:63 readahead:187:213 readlink:89:- readlinkat:267:78
readv:19:65 recvfrom:45:207 rename:82:- renameat2:316:276 renameat:264:38 restart_syscall:219:128 rmdir:84:-
rseq:334:293 rt_sigaction:13:134 rt_sigpending:127:136 rt_sigprocmask:14:135 rt_sigreturn:15:139
rt_sigsuspend:130:133 rt_sigtimedwait:128:137 sched_get_priority_max:146:125 sched_get_priority_min:147:126
sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120 sched_yield:24:124 seccomp:317:277
select:23:- sendfile:40:71 sendto:44:206 set_robust_list:273:99 set_tid_address:218:96 setitimer:38:103
setns:308:268 setpgid:109:154 setsid:112:157 setxattr:188:5 shutdown:48:210 sigaltstack:131:132 signalfd4:289:74
signalfd:282:- socket:41:198 socketpair:53:199 stat:4:- statfs:137:43 statx:332:291 symlink:88:- symlinkat:266:36
sysinfo:99:179 tgkill:234:131 time:201:- timer_create:222:107 timer_delete:226:111 timer_getoverrun:225:109
timer_gettime:224:108 timer_settime:223:110 timerfd_create:283:85 timerfd_gettime:287:87 timerfd_settime:286:86
times:100:153 truncate:76:45 umask:95:166 uname:63:160 unlink:87:- unlinkat:263:35 utime:132:- utimensat:280:88
utimes:235:- vfork:58:- wait4:61:260 waitid:247:95 write:1:64 writev:20:66"""


def machine() -> str:
    """Return the name of the machine architecture, as reported by `uname`."""
    return os.uname().machine


def audit_arch(name: str) -> int | None:
    """Return the number that seccomp uses for this architecture, or None if it is not supported."""
    return _AUDIT_ARCHES.get(name)


def numbers(name: str) -> dict[str, int]:
    """Return this architecture's system call numbers, keyed by name. If it is not supported, return {}."""
    if name not in _COLUMNS:
        return {}
    rows = (entry.split(":") for entry in _TABLE.split())
    return {row[0]: int(row[_COLUMNS[name]]) for row in rows if row[_COLUMNS[name]] != "-"}


NUMBERS: dict[str, int] = numbers(machine())


CAP_DAC_READ_SEARCH: Final = 2
_LAST_KNOWN: Final = 63
_VERSION_3: Final = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = tuple((f"{name}_{half}", ctypes.c_uint32) for half in (0, 1) for name in ("eff", "perm", "inh"))


def keep_capabilities(*numbers: int) -> None:
    """Drop all capabilities of this thread except the given ones. The thread must have the given capabilities.

    The given capabilities are lost on `execve`.
    """
    mask = sum(1 << number for number in numbers)
    header = _Header(_VERSION_3, 0)
    sets = _Sets(mask, mask, 0, 0, 0, 0)
    number = NUMBERS["capset"]
    syscall(number, ctypes.addressof(header), ctypes.addressof(sets), step="drop capabilities")


def empty_bounding_set() -> None:
    """Prevent programs that this process starts from gaining capabilities, even if they are set-user-id programs."""
    for number in range(_LAST_KNOWN + 1):
        try:
            prctl(PR_CAPBSET_DROP, number, "drop capabilities")
        except SetupError as error:
            if error.errno == 22:  # EINVAL: beyond the kernel's last capability
                return
            raise


def become_user(user: int, *, keep_read_search: bool = False) -> None:
    """Change permanently from root to an unprivileged user id that no other process uses."""
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        if keep_read_search:
            prctl(PR_SET_KEEPCAPS, 1, "drop root privileges")
        os.setresuid(user, user, user)
    except OSError as error:
        raise SetupError("drop root privileges", os.strerror(error.errno or 0), error.errno or 0) from error
    keep_capabilities(*([CAP_DAC_READ_SEARCH] if keep_read_search else []))
    if os.getresuid() != (user, user, user) or os.getresgid() != (user, user, user):
        raise SetupError("drop root privileges", "the user id did not change")


MEBIBYTE = 1 << 20
THREADS = 64
"""The maximum number of concurrent threads of sandboxed code, regardless of its limits."""
SIGNALS_AND_TIMERS = 1_024
"""The maximum number of pending signals and kernel timers, counted together over all processes of a user id."""
_SIGPENDING = 11
"""`RLIMIT_SIGPENDING` (asm-generic/resource.h), which Python does not define."""
SPARE_TASKS = 1_024
"""The number of additional tasks of a shared user id at which sandboxed code can no longer start a thread."""


def limit_resources(*, cpu_s: int, address_space: int, file_size: int, open_files: int, tasks: int) -> None:
    """Set the resource limits of this process, in the kernel's units.

    `tasks` limits the number of processes and threads that the user may have. 0 means no limit.
    """
    limits = [
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, open_files),
        # The limit is not 0, because the kernel would still pipe a dump to a collector. 1 byte is too small for any
        # dump.
        (resource.RLIMIT_CORE, 1),
        (resource.RLIMIT_MEMLOCK, 0),
        (_SIGPENDING, SIGNALS_AND_TIMERS),
        *([(resource.RLIMIT_NPROC, tasks)] if tasks else []),
    ]
    for which, value in limits:
        _, hard = resource.getrlimit(which)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(which, (bound, bound))
        except (OSError, ValueError) as error:
            raise SetupError(f"set resource limit {which} to {bound}", str(error)) from error


def count_tasks(user: int) -> int:
    """Return the number of processes and threads of this user id, or 0 if they are not visible in /proc."""
    count = 0
    try:
        folders = [f"/proc/{name}" for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    except OSError:
        return 0
    for folder in folders:
        with contextlib.suppress(OSError):  # the process has ended
            if os.stat(folder).st_uid == user:  # noqa: PTH116
                count += len(os.listdir(f"{folder}/task"))  # noqa: PTH208
    return count


def address_space_in_use(statm: int) -> int:
    """Return the address space of this process in bytes, given an open descriptor of its `/proc/self/statm`."""
    return int(os.pread(statm, 64, 0).split()[0]) * os.sysconf("SC_PAGE_SIZE")

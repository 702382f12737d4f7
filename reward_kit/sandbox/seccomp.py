"""The seccomp filter for sandboxed code. It allows the system calls that the code needs. All others fail with EPERM.

Namespaces alone are not enough. For example, `socket` is not allowed, because AF_VSOCK sockets reach the hypervisor and
netlink sockets reach the kernel, even in a separate network namespace. Some calls are allowed only with certain
arguments. The kernel runs the filter on a `struct seccomp_data` (linux/seccomp.h). The filter searches the call numbers
in a tree, which takes about eight steps per call. A linear search would take about a hundred steps.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from reward_kit.sandbox import linux

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_LOAD, _JUMP, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_AND = 0x54
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32_BIT = 0x40000000
Code = tuple["Instruction", ...]


class Instruction(NamedTuple):
    """A `struct sock_filter`. Each jump is the number of instructions to skip."""

    operation: int
    if_true: int
    if_false: int
    value: int


def errno_action(number: int) -> int:
    """Return the action that makes a call fail with this error number."""
    return _ERRNO | number


def answer(action: int) -> Code:
    """Return the instruction that ends the filter with `action`."""
    return (Instruction(_RETURN, 0, 0, action),)


def low(argument: int) -> Code:
    """Load the lower half of an argument. Arguments are counted from 0. Both architectures are little-endian."""
    return (Instruction(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument),)


def high(argument: int) -> Code:
    """Load the upper half of an argument."""
    return (Instruction(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument + 4),)


def masked(mask: int) -> Code:
    """Keep only the given bits of the loaded value."""
    return (Instruction(_AND, 0, 0, mask),)


def if_equal(value: int, then: Code, otherwise: Code) -> Code:
    """Branch on whether the loaded value equals `value`. Both branches must end the filter."""
    return (Instruction(_EQUAL, 0, _short(then), value), *then, *otherwise)


def if_any_bit(mask: int, then: Code, otherwise: Code) -> Code:
    """Branch on whether any of the given bits are set."""
    return (Instruction(_ANY_BIT, 0, _short(then), mask), *then, *otherwise)


def if_one_of(values: Sequence[int], then: Code, otherwise: Code) -> Code:
    """Branch on whether the loaded value is one of `values`."""
    code = otherwise
    for value in reversed(values):
        code = if_equal(value, then, code)
    return code


def assemble(arch: int, rules: Mapping[int, Code], default: Code) -> bytes:
    """Return the complete filter in the binary format of the kernel. The rule of each call number must end the filter.

    A call that uses the convention of a different architecture, or has the x32 bit set, kills the process.
    """
    foreign = answer(KILL_PROCESS)
    entry = (Instruction(_LOAD, 0, 0, _MACHINE_AT), Instruction(_EQUAL, 1, 0, arch), *foreign)
    number = (Instruction(_LOAD, 0, 0, _NUMBER_AT), Instruction(_AT_LEAST, 0, 1, _X32_BIT), *foreign)
    code = (*entry, *number, *_tree(_ranges(rules, default)))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _ranges(rules: Mapping[int, Code], default: Code) -> list[tuple[int, Code]]:
    """Group consecutive call numbers that share a rule, and return the first number and the rule of each group."""
    starts: list[tuple[int, Code]] = [(0, rules.get(0, default))]
    for number in sorted({*rules, *(number + 1 for number in rules)}):
        code = rules.get(number, default)
        if number and code != starts[-1][1]:
            starts.append((number, code))
    return starts


def _tree(ranges: list[tuple[int, Code]]) -> Code:
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _tree(ranges[:middle]), _tree(ranges[middle:])
    pivot = ranges[middle][0]
    if len(below) <= 255:
        return (Instruction(_AT_LEAST, len(below), 0, pivot), *below, *above)
    return (Instruction(_AT_LEAST, 0, 1, pivot), Instruction(_JUMP, 0, 0, len(below)), *below, *above)


def _short(code: Code) -> int:
    assert len(code) <= 255, "a conditional jump reaches 255 instructions"
    return len(code)


_ALLOWED: Final = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 close close_range lseek dup dup2 dup3 pipe
pipe2 ftruncate fallocate fsync fdatasync sendfile copy_file_range fadvise64 readahead
creat stat fstat lstat newfstatat statx access faccessat faccessat2 getcwd chdir fchdir mkdir mkdirat rmdir
unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat readlink readlinkat umask getdents getdents64
statfs fstatfs
mmap mprotect munmap mremap madvise brk msync mincore membarrier
exit exit_group getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid getsid
set_tid_address set_robust_list get_robust_list rseq futex futex_waitv futex_wake futex_wait futex_requeue
restart_syscall sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max
sched_get_priority_min getpriority nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
getrusage sysinfo uname getcpu getrlimit getrandom capget
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack pause alarm setitimer
getitimer timer_create timer_settime timer_gettime timer_delete timer_getoverrun timerfd_create timerfd_settime
timerfd_gettime eventfd eventfd2 signalfd signalfd4
epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 poll ppoll select pselect6
recvfrom shutdown wait4 waitid
"""
# These calls do not need a file that is open for writing, so Landlock does not check them (`truncate` not before its
# third version). Without a separate root, code could change the modes and times of any file of its user.
_OF_ANY_FILE: Final = "chmod fchmod fchmodat fchmodat2 utime utimes utimensat futimesat truncate"
_FOR_SUBPROCESSES: Final = "fork vfork execve execveat setsid setpgid kill tgkill"
# File copying tries these calls and falls back if they fail.
_NOT_SUPPORTED: Final = """
getxattr lgetxattr fgetxattr setxattr lsetxattr fsetxattr listxattr llistxattr flistxattr
"""
# The C library falls back to `clone` and `openat`. A filter can see the flags of these calls.
_NOT_THERE: Final = "clone3 openat2"
_NOT_FOR_ZYGOTES: Final = "socket connect bind execve execveat ptrace io_uring_setup keyctl"
_FCNTL: Final = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032)  # duplicate, flags, record locks, pipe size
_IOCTL: Final = (0x541B, 0x5421, 0x5450, 0x5451, 0x5401, 0x5413)  # bytes waiting, non-blocking, close-on-exec, is a tty
_PRCTL: Final = (3, 15, 16, 0x53564D41)  # dumpable flag, thread name, names of memory areas
_ARCH_PRCTL: Final = (0x1002, 0x1003)  # the base of thread-local storage, which a new program sets
_CLONE_THREAD: Final = 0x10000
_CLONE_NEW: Final = 0x7E020000  # any new namespace
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xF
_SECCOMP_SET_MODE_FILTER = 1
_OWN_PID: Final = 0x5EC0B1D5
"""A placeholder for the id of the process. It is larger than any id."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def build(machine: str, *, may_start_processes: bool, has_own_root: bool) -> bytes:
    """Build the filter for sandboxed processes, which `for_process` completes.

    If `has_own_root` is true, no process can see a writable file on the host, regardless of the permissions of its
    user.
    """
    known, arch = linux.numbers(machine), linux.audit_arch(machine)
    if arch is None:
        raise linux.SetupError("build the system call filter", f"no table of system calls for {machine}")
    allow, deny = answer(ALLOW), answer(errno_action(errno.EPERM))
    rules = {known[name]: code for name, code in _by_argument(allow, deny).items() if name in known}
    names = [*_ALLOWED.split(), *(_FOR_SUBPROCESSES.split() if may_start_processes else ())]
    rules.update({known[name]: allow for name in names if name in known})
    if may_start_processes:
        rules[known["clone"]] = (*low(0), *if_any_bit(_CLONE_NEW, deny, allow))
    if has_own_root:
        rules.update({known[name]: allow for name in _OF_ANY_FILE.split() if name in known})
    for group, number in ((_NOT_SUPPORTED, errno.ENOTSUP), (_NOT_THERE, errno.ENOSYS)):
        rules.update({known[name]: answer(errno_action(number)) for name in group.split() if name in known})
    return assemble(arch, rules, deny)


def build_for_zygote(machine: str) -> bytes:
    """Build the filter for a zygote without namespaces. It starts sandboxed processes and needs no network."""
    known, arch = linux.numbers(machine), linux.audit_arch(machine)
    if arch is None:
        raise linux.SetupError("build the system call filter", f"no table of system calls for {machine}")
    deny = answer(errno_action(errno.EPERM))
    return assemble(arch, {known[name]: deny for name in _NOT_FOR_ZYGOTES.split()}, answer(ALLOW))


def for_process(filter_code: bytes, own_pid: int) -> bytes:
    """Complete the filter for the process with this id. The process may send signals only to itself."""
    return filter_code.replace(_OWN_PID.to_bytes(4, sys.byteorder), own_pid.to_bytes(4, sys.byteorder))


def _by_argument(allow: Code, deny: Code) -> dict[str, Code]:
    to_self = (*low(0), *if_equal(_OWN_PID, allow, deny))
    stream = (*low(1), *masked(_SOCK_TYPE_MASK), *if_equal(_SOCK_STREAM, allow, deny))
    only_reads = (*low(2), *if_equal(0, (*high(2), *if_equal(0, allow, deny)), deny))
    without_address = (*low(4), *if_equal(0, (*high(4), *if_equal(0, allow, deny)), deny))
    # O_TRUNC empties files that are not open for writing (mode 3 is neither). Landlock before version 3 allows that.
    emptied = (os.O_TRUNC, os.O_TRUNC | os.O_ACCMODE)
    unless_emptied = (*masked(os.O_ACCMODE | os.O_TRUNC), *if_one_of(emptied, deny, allow))
    return {
        "open": (*low(1), *unless_emptied),
        "openat": (*low(2), *unless_emptied),
        "clone": (*low(0), *if_any_bit(_CLONE_NEW, deny, if_any_bit(_CLONE_THREAD, allow, deny))),
        "arch_prctl": (*low(0), *if_one_of(_ARCH_PRCTL, allow, deny)),
        "fcntl": (*low(1), *if_one_of(_FCNTL, allow, deny)),
        "ioctl": (*low(1), *if_one_of(_IOCTL, allow, deny)),
        "prctl": (*low(0), *if_one_of(_PRCTL, allow, deny)),
        "kill": to_self,
        "tgkill": to_self,
        "prlimit64": (*low(0), *if_one_of((0, _OWN_PID), only_reads, deny)),
        "socketpair": (*low(0), *if_equal(_AF_UNIX, stream, deny)),
        "sendto": without_address,
    }


def load(filter_code: bytes) -> None:
    """Apply the filter permanently to the calling thread and its descendants.

    `no_new_privs` must be set for the thread.
    """
    code = ctypes.create_string_buffer(filter_code, len(filter_code))
    header = _Program(len(filter_code) // 8, ctypes.addressof(code))
    number = linux.NUMBERS["seccomp"]
    linux.syscall(number, _SECCOMP_SET_MODE_FILTER, 0, ctypes.addressof(header), step="load the system call filter")

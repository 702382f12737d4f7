"""Test the system call filter, in an interpreter for both architectures, and Landlock's masks."""

from __future__ import annotations

import errno
import struct

import pytest

from reward_kit.sandbox import landlock, linux, seccomp
from reward_kit.sandbox.linux import SetupError

PID = 7
KILL, ALLOW, EPERM = "kill", "allow", errno.EPERM
MACHINES = ("x86_64", "aarch64")


def decide(code: bytes, number: int, arguments: tuple[int, ...] = (), arch: int = 0) -> str | int:
    """Return the kernel's decision on the call."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    program = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, value = program[at]
        at += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
        elif operation == 0x54:
            accumulator &= value
        elif operation == 0x05:
            at += value
        elif operation == 0x06:
            return {seccomp.ALLOW: ALLOW, seccomp.KILL_PROCESS: KILL}.get(value, value & 0xFFFF)
        else:
            test = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[operation]
            at += if_true if test else if_false


class Filter:
    def __init__(self, machine: str, may_start_processes: bool = False) -> None:
        self._machine = machine
        code = seccomp.build(machine, may_start_processes=may_start_processes, has_own_root=True)
        self._code = seccomp.for_process(code, PID)

    def __call__(self, name: str, *arguments: int) -> str | int:
        number = linux.numbers(self._machine)[name]
        return decide(self._code, number, arguments, linux.audit_arch(self._machine))

    def number(self, number: int, arch: int | None = None) -> str | int:
        return decide(self._code, number, (), arch or linux.audit_arch(self._machine))


@pytest.fixture(params=MACHINES)
def confined(request):
    return Filter(request.param)


@pytest.fixture(params=MACHINES)
def with_processes(request):
    return Filter(request.param, may_start_processes=True)


def test_system_calls_of_python_are_allowed(confined):
    for name in ("read", "write", "openat", "mmap", "futex", "exit_group", "getrandom", "rt_sigreturn", "epoll_ctl"):
        assert confined(name) == ALLOW


# By number, as they are on no list of ours: sockets, ptrace, mounts, bpf, io_uring, keyrings, userfaultfd, flock,
# memfd, System V objects, message queues, perf events, file handles, pidfds, raised limits, user ids, modules, kexec.
_X86_64 = """
    41 42 49 50 43 288 101 165 166 155 161 272 308 310 311 321 323 425 426 427 250 248 73 319 29 64
    68 240 298 304 303 434 438 424 160 105 117 116 126 47 46 55 54 175 246
"""
_AARCH64 = """
    198 203 200 201 202 117 40 39 41 51 97 268 270 271 280 282 425 426 427 219 217 32 279 194 190
    186 180 241 265 264 434 438 424 164 146 147 159 91 212 211 208 105
"""
_LISTS = zip(MACHINES, (_X86_64, _AARCH64), strict=True)
FORBIDDEN = {machine: [int(number) for number in text.split()] for machine, text in _LISTS}


@pytest.mark.parametrize("machine", MACHINES)
def test_forbidden_system_calls_are_denied(machine):
    code = Filter(machine)
    assert {number: code.number(number) for number in FORBIDDEN[machine]} == dict.fromkeys(FORBIDDEN[machine], EPERM)
    assert code.number(10_000) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_system_calls_of_another_architecture_kill_the_process(machine):
    code = Filter(machine)
    assert code.number(0x40000000 | 41) == KILL
    assert code.number(0, arch=0x40000003) == KILL
    other = MACHINES[1 - MACHINES.index(machine)]
    assert code.number(0, arch=linux.audit_arch(other)) == KILL


def test_filter_allows_threads_and_denies_processes(confined):
    assert confined("clone", 0x3D0F00) == ALLOW
    assert confined("clone", 17) == EPERM
    assert confined("clone", 0x10000 | 0x10000000) == EPERM
    assert confined("clone3") == errno.ENOSYS
    assert confined("execve") == EPERM


def test_filter_with_processes_still_denies_namespaces(with_processes):
    assert with_processes("clone", 17) == ALLOW
    assert with_processes("execve") == ALLOW
    assert with_processes("kill", 1) == ALLOW
    assert with_processes("clone", 17 | 0x10000000) == EPERM


def test_signals_to_other_processes_are_denied(confined):
    assert confined("kill", PID, 9) == ALLOW
    assert confined("tgkill", PID, PID, 6) == ALLOW
    for target in (0, 1, 2**32 - 1, 2**64 - 1, PID + 1):
        assert confined("kill", target, 9) == EPERM


def test_system_calls_are_filtered_by_their_arguments(confined):
    assert confined("prlimit64", 0, 7, 0) == ALLOW
    assert confined("prlimit64", 0, 7, 1 << 32) == EPERM
    assert confined("prlimit64", 1, 7, 0) == EPERM
    assert confined("socketpair", 1, 1 | 0o2000000) == ALLOW
    assert confined("socketpair", 1, 2) == EPERM
    assert confined("socketpair", 2, 1) == EPERM
    assert confined("sendto", 3, 0, 0, 0, 0) == ALLOW
    assert confined("sendto", 3, 0, 0, 0, 1 << 40) == EPERM
    assert confined("fcntl", 1, 3) == ALLOW
    assert confined("fcntl", 1, 8) == EPERM
    assert confined("ioctl", 0, 0x5401) == ALLOW
    assert confined("ioctl", 0, 0x5412) == EPERM
    assert confined("prctl", 15) == ALLOW
    assert confined("prctl", 1) == EPERM
    assert confined("openat2") == errno.ENOSYS
    assert confined("fgetxattr") == errno.ENOTSUP


def test_unsupported_architecture_is_rejected():
    with pytest.raises(SetupError, match="riscv64"):
        seccomp.build("riscv64", may_start_processes=False, has_own_root=True)


def test_landlock_handles_only_rights_known_to_its_version():
    assert landlock.handled(1) == (1 << 13) - 1
    assert landlock.handled(3) == (1 << 15) - 1
    assert landlock.handled(7) == (1 << 16) - 1
    rights = landlock.work_folder_rights(7, may_execute=False)
    assert not rights & landlock.EXECUTE
    assert not rights & (1 << 6 | 1 << 9 | 1 << 10 | 1 << 11), "no device, socket or pipe with a name"
    assert landlock.work_folder_rights(7, may_execute=True) & landlock.EXECUTE

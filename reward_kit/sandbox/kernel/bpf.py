"""A small assembler for seccomp's filters: a search tree over system call numbers whose leaves are actions.

The kernel runs the program on `struct seccomp_data` (linux/seccomp.h): the call's number at byte 0, the machine at
byte 4, six 64-bit arguments from byte 16. A tree needs about eight steps a call where a list needs a hundred, and the
kernel, which tries every number once when a filter is loaded, loads it that much sooner.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000

_LOAD, _JUMP, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_AND = 0x54
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32_BIT = 0x40000000

Code = tuple["Instruction", ...]


class Instruction(NamedTuple):
    """One `struct sock_filter`; the jumps count the instructions to skip."""

    operation: int
    if_true: int
    if_false: int
    value: int


def errno_action(number: int) -> int:
    """The action that lets a call fail with this error number."""
    return _ERRNO | number


def answer(action: int) -> Code:
    """End with `action`."""
    return (Instruction(_RETURN, 0, 0, action),)


def low(argument: int) -> Code:
    """Load the lower half of an argument; 0 is the first. Both machines are little-endian."""
    return (Instruction(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument),)


def high(argument: int) -> Code:
    """Load the upper half of an argument."""
    return (Instruction(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument + 4),)


def masked(mask: int) -> Code:
    """Keep these bits of what is loaded."""
    return (Instruction(_AND, 0, 0, mask),)


def if_equal(value: int, then: Code, otherwise: Code) -> Code:
    """Go on by whether what is loaded equals `value`; both ways must end."""
    return (Instruction(_EQUAL, 0, _short(then), value), *then, *otherwise)


def if_any_bit(mask: int, then: Code, otherwise: Code) -> Code:
    """Go on by whether any of the bits is set."""
    return (Instruction(_ANY_BIT, 0, _short(then), mask), *then, *otherwise)


def if_one_of(values: Sequence[int], then: Code, otherwise: Code) -> Code:
    """Go on by whether what is loaded is one of `values`."""
    code = otherwise
    for value in reversed(values):
        code = if_equal(value, then, code)
    return code


def program(arch: int, rules: Mapping[int, Code], default: Code) -> bytes:
    """The whole filter, as the kernel reads it.

    Args:
        arch: the machine whose numbers the rules use; a call made for another one kills the process, and so does one
            with the bit of the x32 machine.
        rules: what happens at a system call number; each must end.
        default: what happens at any other.
    """
    foreign = answer(KILL_PROCESS)
    entry = (Instruction(_LOAD, 0, 0, _MACHINE_AT), Instruction(_EQUAL, 1, 0, arch), *foreign)
    number = (Instruction(_LOAD, 0, 0, _NUMBER_AT), Instruction(_AT_LEAST, 0, 1, _X32_BIT), *foreign)
    code = (*entry, *number, *_tree(_ranges(rules, default)))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _ranges(rules: Mapping[int, Code], default: Code) -> list[tuple[int, Code]]:
    """Where each run of numbers with the same rule starts, from 0 up."""
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

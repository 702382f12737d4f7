"""Which walls this machine can put up: each is tried in a throw-away child, and what fails is told with its reason."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from reward_kit.errors import ConfigError
from reward_kit.sandbox.kernel.libc import SetupError
from reward_kit.sandbox.limits import Limits
from reward_kit.sandbox.outcome import Strength
from reward_kit.sandbox.program import Program, world_of
from reward_kit.sandbox.worker import request_of, run_isolated
from reward_kit.sandbox.zygote_process import ZygoteProcess

STRENGTHS: tuple[Strength, ...] = ("namespaces", "landlock", "process")
_CONFINING: tuple[Strength, ...] = ("namespaces", "landlock")

# Both must fail in whatever deserves the name of a sandbox: a socket, and the list of the machine's accounts.
_TRIAL = """
def trial(_):
    reached = []
    try:
        import _socket
        _socket.socket(2, 1)
        reached.append("a socket")
    except OSError:
        pass
    try:
        open("/etc/passwd").close()
        reached.append("a file of the host")
    except OSError:
        pass
    return reached
"""

_known: dict[Strength, Availability] = {}


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether one strength works here.

    Attributes:
        strength: which.
        is_available: a child was run behind these walls, and they held.
        reason: why not; "" where it works.
        landlock: the version of Landlock that is in force; 0 for none.
    """

    strength: Strength
    is_available: bool
    reason: str = ""
    landlock: int = 0


async def probe() -> tuple[Availability, ...]:
    """Try every strength, strongest first; what was found holds for this process's life."""
    return tuple([await _availability(strength) for strength in STRENGTHS])


async def best_strength(wanted: Strength | Literal["auto"]) -> Strength:
    """The strength to use.

    Raises:
        ConfigError: it, or for "auto" any that confines, is not to be had here.
    """
    candidates = _CONFINING if wanted == "auto" else (wanted,)
    missing = []
    for strength in candidates:
        found = await _availability(strength)
        if found.is_available:
            return strength
        missing.append(f"{strength}: {found.reason}")
    raise ConfigError(f"this machine cannot confine code ({'; '.join(missing)})")


async def _availability(strength: Strength) -> Availability:
    if strength not in _known:
        _known[strength] = await _try(strength)
    return _known[strength]


async def _try(strength: Strength) -> Availability:
    if sys.platform != "linux":
        return Availability(strength, False, f"it needs Linux, and this is {sys.platform}")
    program = Program(_TRIAL, "trial", form="plain")
    try:
        zygote = await ZygoteProcess.start(world_of(program, may_start_processes=False), strength)
    except SetupError as error:
        return Availability(strength, False, str(error))
    try:
        outcome = await run_isolated(zygote, program, request_of(program, None), Limits(), strength)
    finally:
        await zygote.close()
    if outcome.failure is not None:
        return Availability(strength, False, outcome.failure.message)
    if outcome.value and strength != "process":
        return Availability(strength, False, f"confined code still reached {' and '.join(outcome.value)}")
    return Availability(strength, True, landlock=int(zygote.facts["landlock"]))

"""Sandboxed execution of reward functions and of model-written code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.sandbox.host import Sandbox as Sandbox
    from reward_kit.sandbox.host import probe as probe
    from reward_kit.sandbox.outcome import Outcome as Outcome
    from reward_kit.sandbox.program import Limits as Limits
    from reward_kit.sandbox.program import Program as Program

_MODULES = {
    "host": "Sandbox probe",
    "outcome": "Outcome",
    "program": "Limits Program",
}
__all__ = sorted(" ".join(_MODULES.values()).split())
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)

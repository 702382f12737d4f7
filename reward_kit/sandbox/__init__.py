"""Confined execution of reward functions and of model-written code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

if TYPE_CHECKING:
    from reward_kit.sandbox.host import Sandbox as Sandbox
    from reward_kit.sandbox.host import probe as probe
    from reward_kit.sandbox.outcome import Outcome as Outcome
    from reward_kit.sandbox.program import Limits as Limits
    from reward_kit.sandbox.program import Program as Program

_HOMES = {
    "Limits": "program",
    "Outcome": "outcome",
    "Program": "program",
    "Sandbox": "host",
    "probe": "host",
}
__all__ = ["Limits", "Outcome", "Program", "Sandbox", "probe"]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

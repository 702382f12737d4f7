"""Confined execution of reward functions and of model-written code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

if TYPE_CHECKING:
    from reward_kit.sandbox.availability import probe as probe
    from reward_kit.sandbox.host import Sandbox as Sandbox
    from reward_kit.sandbox.limits import Limits as Limits
    from reward_kit.sandbox.outcome import Outcome as Outcome
    from reward_kit.sandbox.program import Program as Program
    from reward_kit.sandbox.remote import RemoteSandbox as RemoteSandbox
    from reward_kit.sandbox.remote import sandbox_at as sandbox_at

_HOMES = {
    "Limits": "limits",
    "Outcome": "outcome",
    "Program": "program",
    "RemoteSandbox": "remote",
    "Sandbox": "host",
    "probe": "availability",
    "sandbox_at": "remote",
}

__all__ = ["Limits", "Outcome", "Program", "RemoteSandbox", "Sandbox", "probe", "sandbox_at"]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

"""Lockstep needs every session of a batch to be open before the first of them asks: they wait for one another here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import torch

from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.environments.base import ToolSpec
from reward_kit.models import Message


class StartTogether(AgentPolicy):
    """A trainable policy whose sessions are handed out once all of a batch are open, or can never be.

    An engine that computes every open session at once would else begin with whichever world was ready first, and its
    batches, and so the last bits of its figures, would hang on the clock.

    Args:
        policy: whose sessions they are.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._expected = self._arrived = 0
        self._complete = anyio.Event()

    @property
    def module(self) -> torch.nn.Module:
        """The weights in training."""
        module: torch.nn.Module = self._policy.module
        return module

    @property
    def pad_token_id(self) -> int:
        """What fills up rows."""
        pad: int = self._policy.pad_token_id
        return pad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def expect(self, sessions: int) -> None:
        """So many sessions will be opened, and wait for one another."""
        self._expected, self._arrived, self._complete = sessions, 0, anyio.Event()

    def give_up(self) -> None:
        """One of the expected sessions will never be opened; where all are open, nothing changes."""
        self._expected -= 1
        self._look()

    def _look(self) -> None:
        if self._arrived >= self._expected:
            self._complete.set()

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """The session, once those of the others are open too."""
        session: AgentPolicy = await self._policy.open(context)
        self._arrived += 1
        self._look()
        try:
            await self._complete.wait()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await session.close()
            raise
        return session

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """That of the policy itself, which has no session."""
        output: PolicyOutput = await self._policy.get_action(observation, available_tools_specs)
        return output

    async def publish(self, version: int) -> None:
        """Act with the weights that are trained."""
        await self._policy.publish(version)

    async def close(self) -> None:
        """Close the policy."""
        await self._policy.close()

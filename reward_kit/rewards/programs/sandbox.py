"""The sandbox in which rewards run what a model wrote: one per worker, opened when it is first needed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from reward_kit.errors import ConfigError, RewardError
from reward_kit.sandbox.host import Sandbox
from reward_kit.sandbox.outcome import Outcome
from reward_kit.sandbox.program import Limits, Program

_REFUSAL = "what a model wrote is run in a sandbox only"
_SLOTS_PER_CPU = 2
"""Programs that sleep leave the processor to others; with more than two, wall limits would meet honest ones."""


class CodeSandboxes:
    """The sandbox of one worker, for the length of an `async with`. It never runs anything unconfined."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._refusal = ""
        self._opening: asyncio.Lock | None = None

    async def __aenter__(self) -> CodeSandboxes:
        self._opening = asyncio.Lock()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sandbox = None
        await self._stack.aclose()

    @classmethod
    async def check_options(cls, options: Mapping[str, Any]) -> None:
        """Reject, before the first rollout, a machine on which nothing could be scored.

        Raises:
            ConfigError: this machine cannot confine code.
        """
        async with cls() as sandboxes:
            await sandboxes._opened()

    async def ask(self, program: Program, inputs: Sequence[Any], limits: Limits) -> list[Outcome]:
        """As `Sandbox.ask`. What is lost for reasons of the sandbox is asked once more.

        Raises:
            ConfigError: this machine cannot confine code; the rollout is unscored, its class `refused`.
            RewardError: it was lost again; the rollout is unscored.
        """
        sandbox = await self._opened()
        outcomes = await sandbox.ask(program, inputs, limits=limits)
        if _lost(outcomes):
            outcomes = await sandbox.ask(program, inputs, limits=limits)
        for outcome in outcomes:
            if outcome.kind == "setup" and outcome.failure is not None:
                raise ConfigError(outcome.failure.message)
        if lost := _lost(outcomes):
            raise RewardError(f"the sandbox lost the program twice: {lost}")
        return outcomes

    async def _opened(self) -> Sandbox:
        if self._opening is None:
            raise ConfigError("the sandboxes of code rewards are used outside of their `async with`")
        async with self._opening:
            if self._sandbox is None and not self._refusal:
                sandbox = Sandbox(slots=_SLOTS_PER_CPU * len(os.sched_getaffinity(0)))
                try:
                    self._sandbox = await self._stack.enter_async_context(sandbox)
                # Nothing has changed when the next rollout comes, and finding out takes a while: the reason is kept.
                except ConfigError as error:
                    self._refusal = f"{_REFUSAL}: {error}; or serve the reward from a Linux container and name its URL"
                except OSError as error:
                    self._refusal = (
                        f"{_REFUSAL}, and none can be set up ({error}); a reward that brings its own sandbox runs at "
                        "the level in_process, not inside another sandbox"
                    )
        if self._sandbox is None:
            raise ConfigError(self._refusal)
        return self._sandbox


def _lost(outcomes: Sequence[Outcome]) -> str:
    messages = (one.failure.message for one in outcomes if one.kind == "zygote" and one.failure is not None)
    return next(messages, "")

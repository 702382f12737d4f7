"""Where rewards run what a model wrote: one sandbox per worker and back end, opened when it is first needed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from reward_kit.errors import ConfigError, RewardError
from reward_kit.sandbox.limits import Limits
from reward_kit.sandbox.outcome import Outcome
from reward_kit.sandbox.program import Program
from reward_kit.sandbox.remote import Confinement, sandbox_at

_REFUSAL = "what a model wrote is run behind walls only"
_LOST = ("zygote", "connection")
_SLOTS_A_CPU = 2
"""Programs that sleep leave the processor to others; with more than two, wall limits would meet honest ones."""


class CodeSandboxes:
    """The sandboxes of one worker, for the length of an `async with`. None of them runs anything without walls."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._open: dict[str | None, Confinement | str] = {}
        self._opening: asyncio.Lock | None = None

    async def __aenter__(self) -> CodeSandboxes:
        self._opening = asyncio.Lock()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = {}
        await self._stack.aclose()

    @classmethod
    async def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse what could score nothing, before the first rollout.

        Raises:
            ConfigError: nothing can be confined where the options say.
        """
        async with cls() as sandboxes:
            await sandboxes._at(options.get("back_end"))

    async def ask(
        self, program: Program, inputs: Sequence[Any], limits: Limits, back_end: str | None = None
    ) -> list[Outcome]:
        """As `Sandbox.ask`. What is lost for reasons of the sandbox is asked once more.

        Raises:
            ConfigError: nothing can be confined there; the rollout is unscored, its class `refused`.
            RewardError: it was lost again; the rollout is unscored.
        """
        sandbox = await self._at(back_end)
        outcomes = await sandbox.ask(program, inputs, limits=limits)
        if _lost(outcomes):
            outcomes = await sandbox.ask(program, inputs, limits=limits)
        for outcome in outcomes:
            if outcome.kind == "setup" and outcome.failure is not None:
                raise ConfigError(outcome.failure.message)
        if lost := _lost(outcomes):
            raise RewardError(f"the sandbox lost the program twice: {lost}")
        return outcomes

    async def _at(self, back_end: str | None) -> Confinement:
        if self._opening is None:
            raise ConfigError("the sandboxes of code rewards are used outside of their `async with`")
        async with self._opening:
            if back_end not in self._open:
                slots = None if back_end is not None else _SLOTS_A_CPU * len(os.sched_getaffinity(0))
                try:
                    self._open[back_end] = await self._stack.enter_async_context(sandbox_at(back_end, slots=slots))
                # Nothing has changed when the next rollout comes, and finding out takes a while: the reason is kept.
                except ConfigError as error:
                    self._open[back_end] = f"{_REFUSAL}: {error}; or name a back end, such as back_end='docker:IMAGE'"
                except OSError as error:
                    self._open[back_end] = (
                        f"{_REFUSAL}, and none can be put up ({error}); a reward that brings its own sandbox runs at "
                        "the level in_process, not behind other walls"
                    )
            found = self._open[back_end]
        if isinstance(found, str):
            raise ConfigError(found)
        return found


def _lost(outcomes: Sequence[Outcome]) -> str:
    messages = [one.failure.message for one in outcomes if one.kind in _LOST and one.failure is not None]
    return messages[0] if messages else ""

"""Forking by replay, for environments that cannot be copied.

To fork an environment, the recorded actions are repeated in a new environment, and the outcomes are compared with the
recorded outcomes.

A subclass implements `_setup`, `_reset` and `_step` instead of `setup`, `reset` and `step`. Its constructor takes no
arguments. The environment must be private, because replayed actions take effect again. If `fork_kind_for` returns
"none" for a configuration, nothing is recorded and `fork` raises an error.
"""

from __future__ import annotations

import copy
import secrets
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from reward_kit.display_text import first_difference
from reward_kit.environments.base import ForkableResource, ForkKind, StepOutcome
from reward_kit.errors import EnvironmentFailure, ToolError

Event = tuple[str, Mapping[str, Any], StepOutcome | None]
"""An action, its arguments and its outcome. The outcome is `None` for `reseed_noise`."""


class ReplayForkResource(ForkableResource):
    """A resource whose `fork` and `restore` methods repeat the recorded actions."""

    fork_kind: ClassVar[ForkKind] = "replay"

    def __init__(self) -> None:
        self._config: Mapping[str, Any] = {}
        self._reset_seed: int | None = None
        self._history: list[Event] = []
        self._replayed: StepOutcome | None = None  # the recorded outcome of the step that is being repeated

    @abstractmethod
    async def _setup(self, config: Mapping[str, Any]) -> None:
        """Implement `setup`."""

    @abstractmethod
    async def _reset(self, seed: int) -> None:
        """Implement `reset`. The seed is never `None`, so the reset can be repeated."""

    @abstractmethod
    async def _step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        """Implement `step`."""

    def _reseed(self, seed: int) -> None:
        """Implement `reseed_noise`."""
        return

    async def setup(self, config: Mapping[str, Any]) -> None:
        self._config = copy.deepcopy(dict(config))
        await self._setup(config)

    async def reset(self, seed: int | None = None) -> None:
        self._reset_seed = secrets.randbits(32) if seed is None else seed
        self._history = []
        await self._reset(self._reset_seed)

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        if not self._is_replayed():
            return await self._step(action_name, action_params)
        arguments = copy.deepcopy(dict(action_params))
        # A ToolError leaves the state unchanged, so there is nothing to repeat.
        outcome = await self._step(action_name, action_params)
        self._history.append((action_name, arguments, copy.deepcopy(outcome)))
        return outcome

    async def reseed_noise(self, seed: int) -> None:
        if self._is_replayed():
            self._history.append(("reseed_noise", {"seed": seed}, None))
        self._reseed(seed)

    async def fork(self) -> ForkableResource:
        self._require_replay()
        twin = type(self)()
        try:
            await twin.setup(self._config)
            await twin._replay(self._reset_seed, self._history)
            _compare("after the replay", "the state key", await self.state_key(), await twin.state_key())
        except BaseException:
            await twin.close()
            raise
        return twin

    async def checkpoint(self) -> Any:
        self._require_replay()
        return (self._reset_seed, tuple(self._history))

    async def restore(self, state: Any) -> None:
        self._require_replay()
        seed, history = state
        await self._replay(seed, list(history))

    def _is_replayed(self) -> bool:
        return self.fork_kind_for(self._config) == "replay"

    def _require_replay(self) -> None:
        if not self._is_replayed():
            raise NotImplementedError(f"{type(self).__name__} cannot be forked with this configuration")

    async def _replay(self, seed: int | None, history: list[Event]) -> None:
        """Reset this environment and repeat all of `history`.

        Raises:
            EnvironmentFailure: an outcome differs from the recorded outcome.
        """
        await self.reset(seed)
        for number, (name, arguments, expected) in enumerate(history):
            if expected is None:
                await self.reseed_noise(arguments["seed"])
                continue
            where = f"step {number} ({name} {dict(arguments)!r})"
            self._replayed = expected
            try:
                outcome = await self.step(name, arguments)
            except ToolError as error:
                raise EnvironmentFailure(f"replay: {where} was rejected in the replay: {error}") from error
            finally:
                self._replayed = None
            for field in ("observation", "reward", "terminated", "truncated"):
                _compare(where, f"the {field}", getattr(expected, field), getattr(outcome, field))


def _compare(where: str, what: str, before: Any, now: Any) -> None:
    difference = first_difference(before, now)
    if difference:
        raise EnvironmentFailure(
            f"replay: {where}: {what} differs{difference}; this environment cannot be forked by replay"
        )

"""`ScriptedPolicy`: acts from a list of actions or a function. The policy of tests, demos and first tutorials."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from reward_kit.agent.policy_interface import Action, AgentPolicy, EpisodeContext, PolicyOutput, check_output
from reward_kit.environments.base import ToolSpec
from reward_kit.models import Message

Script = Sequence[Action] | Callable[[Sequence[Message], list[ToolSpec] | None], Any]


class ScriptedPolicy(AgentPolicy):
    """Plays a script.

    Args:
        actions: the actions in order, after which the policy terminates; or a function, sync or async, of the
            conversation and the tools that returns an action, a 4-tuple or a `PolicyOutput`.

    Raises:
        PolicyError: an action of the list is none.
    """

    is_free = True

    def __init__(self, actions: Script) -> None:
        if not callable(actions):
            for action in actions:
                check_output(PolicyOutput(action))
        self._script = actions

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """A session with a cursor of its own."""
        return self if callable(self._script) else _Playback(self._script)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """The function's action; for a list, its first."""
        if not callable(self._script):
            return await _Playback(self._script).get_action(observation)
        result = self._script(observation, available_tools_specs)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, tuple) else _output(result)  # type: ignore[return-value]


class _Playback(AgentPolicy):
    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions, self._next = actions, 0

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        if self._next >= len(self._actions):
            return _output({"type": "terminate"})
        action = self._actions[self._next]
        self._next += 1
        return _output(action)


def _output(action: Action) -> PolicyOutput:
    content = action.get("content") if isinstance(action, dict) else None
    return PolicyOutput(action, content, None, None)

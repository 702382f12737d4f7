"""`OwnAgentPolicy`: an agent with a loop of its own, in any framework, whose requests to the model are recorded.

The agent gets a private OpenAI-compatible address in front of the real model and needs nothing else of this package.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.agent.policies.own_agent.recording_endpoint import RecordingEndpoint
from reward_kit.agent.policies.own_agent.session import Agent, AgentSession
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, PolicyError
from reward_kit.loading import load_object
from reward_kit.models import Message

logger = logging.getLogger("reward_kit.agent")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _with_options_of(kind: type[AgentPolicy]) -> Callable[[_Function], _Function]:
    """Let a constructor that hands `**options` on show them, so that a misspelt one is refused by name."""

    def mark(constructor: _Function) -> _Function:
        both = (*inspect.signature(constructor).parameters.values(), *inspect.signature(kind).parameters.values())
        named = {parameter.name: parameter for parameter in both if parameter.kind is not parameter.VAR_KEYWORD}
        ordered = sorted(named.values(), key=lambda parameter: parameter.kind)
        constructor.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        return constructor

    return mark


class OwnAgentPolicy(AgentPolicy):
    """Runs an agent, and records every answer that the model gives it as one action.

    An action is complete once the agent has come back with its next request, or has ended: what it did in between, in
    the episode's world or by itself, stands in the action's `results`. So the limits on a policy's time hold for the
    agent's own work too, and an agent is stopped where its episode ends.

    Args:
        agent: the agent, or `file.py:function`; see `Agent`.
        model: the model's name at the real endpoint.
        **options: the further options of `OpenAIAgentPolicy`: where the real endpoint is, and how it is asked. They go
            before what the agent asks for.

    Raises:
        ConfigError: the agent cannot be loaded, or not be called so, or an option is wrong.
    """

    path_options = OpenAIAgentPolicy.path_options
    object_options = ("agent",)

    @_with_options_of(OpenAIAgentPolicy)
    def __init__(self, agent: Agent | str, model: str, **options: Any) -> None:
        self._agent = _checked_agent(load_object(agent) if isinstance(agent, str) else agent)
        self._model = model
        self._upstream = OpenAIAgentPolicy(model, **options)
        self._endpoint = RecordingEndpoint(model)

    def __repr__(self) -> str:
        return f"OwnAgentPolicy({getattr(self._agent, '__name__', self._agent)!r}, {self._upstream!r})"

    @property
    def knows_cost(self) -> bool:
        """As the policy that asks the real endpoint."""
        return self._upstream.knows_cost

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """One episode: a run of the agent, with an address of its own."""
        session = AgentSession(self._agent, self._model, self._upstream, context)
        await session.listen(self._endpoint)
        return session

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Refused: an agent runs from the beginning of an episode to its end."""
        raise PolicyError("own_agent acts in episodes only; open a session first")

    async def close(self) -> None:
        """Stop the recording endpoint, and close the connections to the real one."""
        try:
            await self._endpoint.close()
        finally:
            await self._upstream.close()


def _checked_agent(agent: Any) -> Agent:
    if not callable(agent):
        raise ConfigError(f"agent: expected a function of the task and the base URL, got {agent!r}")
    try:
        inspect.signature(agent).bind(None, "")
    except TypeError as error:
        raise ConfigError(f"agent: {agent!r} cannot be called with the task and the base URL: {error}") from error
    except ValueError:
        logger.debug("the signature of %r is not known", agent)
    return agent  # type: ignore[no-any-return]

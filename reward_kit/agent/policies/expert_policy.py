"""`ExpertPolicy`: asks the resource what an expert would do. The ceiling of a task, and a source of demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.environments.base import ForkableResource, ToolSpec
from reward_kit.errors import PolicyError
from reward_kit.models import Message


class ExpertPolicy(AgentPolicy):
    """Takes the resource's `expert_action`, and terminates where it has none left.

    Args:
        resource: the episode's world; `open` fills it in.
    """

    is_free = True

    def __init__(self, resource: ForkableResource | None = None) -> None:
        self._resource = resource
        self._has_acted = False

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """A session that asks the episode's own world.

        Raises:
            PolicyError: the task has no resource.
        """
        if context.resource is None:
            raise PolicyError("the expert policy asks the resource, and this task has none")
        return ExpertPolicy(context.resource)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """The expert's action.

        Raises:
            PolicyError: the resource has no expert.
        """
        action = await self._resource.expert_action() if self._resource else None
        if action is not None:
            self._has_acted = True
            return PolicyOutput(dict(action), action.get("content"))
        if self._has_acted:
            return PolicyOutput({"type": "terminate"})
        raise PolicyError(f"{type(self._resource).__name__} has no expert; define expert_action() or choose a policy")

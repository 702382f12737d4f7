"""`RandomPolicy`: the baseline every agent must beat. Draws from the admissible actions, or from the tools' schemas."""

from __future__ import annotations

import random
from collections.abc import Sequence

from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.environments.base import ForkableResource, ToolSpec
from reward_kit.environments.sampling import sample_arguments
from reward_kit.models import Message


class RandomPolicy(AgentPolicy):
    """Acts at random, from the episode's policy seed.

    Where the resource lists its admissible actions, each is equally likely; otherwise each tool is, with arguments
    drawn from its schema. Without tools it answers with an empty text.
    """

    is_free = True

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._resource: ForkableResource | None = None

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """A session with a random generator of its own."""
        session = RandomPolicy()
        session._random, session._resource = random.Random(context.seed), context.resource
        return session

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """A random action."""
        admissible = await self._resource.admissible_actions() if self._resource else None
        if admissible:
            return PolicyOutput({"type": "tool_call", **self._random.choice(list(admissible))})
        if not available_tools_specs:
            return PolicyOutput({"type": "text", "content": ""}, "")
        tool = self._random.choice(available_tools_specs)["function"]
        arguments = sample_arguments(tool["parameters"], self._random)
        return PolicyOutput({"type": "tool_call", "name": tool["name"], "arguments": arguments})

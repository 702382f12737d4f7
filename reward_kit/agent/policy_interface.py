"""`AgentPolicy`: what acts in an episode.

A policy object is shared by all episodes of a run. `open` gives one episode its session: its random generator, its
cursor, its KV slot. The worker acts through the session and closes it. A policy without per-episode state returns
itself from `open` (the default), and its `close_session` then does nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from reward_kit.environments.base import ForkableResource, ToolSpec
from reward_kit.errors import PolicyError
from reward_kit.models import Message

Action = dict[str, Any]
"""One of `{"type": "text", "content"}`, `{"type": "tool_call", "name", "arguments", "id"?, "content"?}`,
`{"type": "tool_calls", "calls": [{"name", "arguments", "id"?}, …], "content"?}` and
`{"type": "terminate", "content"?}`.

`arguments` is a mapping. Where a model wrote arguments that are no JSON object, the call carries them verbatim as
`arguments_text` instead, and the agent is told so by a tool error.
"""


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """What a session may know of its episode.

    Attributes:
        rollout_id: unique in a run.
        seed: for everything random in the policy; never shared between episodes.
        resource: the episode's live world, None where the task has tools only. Experts ask it; models must not.
    """

    rollout_id: str
    seed: int
    resource: ForkableResource | None = None


class PolicyOutput(NamedTuple):
    """One action of a policy. A plain 4-tuple in this order is accepted too.

    Attributes:
        action_structured: the action; see `Action`.
        raw_policy_output: the text as the model wrote it, where there is one.
        log_probs: `prompt_ids` (P,), `token_ids` (N,), `logprobs` (N,) of the distribution really sampled,
            `policy_version`, `usage` (`prompt_tokens`, `completion_tokens`, `cost`); each absent where unknown.
        value_estimate: V(s) in the units of the return, where the policy has a critic.
    """

    action_structured: Action
    raw_policy_output: str | None = None
    log_probs: dict[str, Any] | None = None
    value_estimate: float | None = None


class AgentPolicy(ABC):
    """Subclass this to put your own agent into an episode."""

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """The session of one episode; by default the policy itself."""
        return self

    @abstractmethod
    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Choose the next action.

        Args:
            observation: the whole conversation so far, read-only; its last messages are new.
            available_tools_specs: the tools that can be called now, in OpenAI form; None where there are none.
        """

    async def close_session(self) -> None:
        """End this episode's session. Called on what `open` returned, once, also after a failure."""
        return

    async def close(self) -> None:
        """Release what the policy itself holds. Called once, when no further session will be opened."""
        return


ACTION_TYPES = ("text", "tool_call", "tool_calls", "terminate")


def check_output(output: object) -> PolicyOutput:
    """`output` as a `PolicyOutput`.

    Raises:
        PolicyError: it is no 4-tuple, or its action is none of the known kinds.
    """
    if not isinstance(output, PolicyOutput):
        if not isinstance(output, tuple) or len(output) != 4:
            raise PolicyError(f"get_action returned {type(output).__name__}; expected a PolicyOutput or a 4-tuple")
        output = PolicyOutput(*output)
    action = output.action_structured
    kind = action.get("type") if isinstance(action, Mapping) else None
    if kind not in ACTION_TYPES:
        raise PolicyError(f"unknown action {action!r}; its type must be one of {', '.join(ACTION_TYPES)}")
    if kind == "text" and not isinstance(action.get("content"), str):
        raise PolicyError(f"a text action needs a 'content' string, got {action!r}")
    for call in tool_calls_of(action):
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise PolicyError(f"a tool call needs a 'name' string, got {call!r}")
    return output


def tool_calls_of(action: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tool calls of an action, in order; [] for text and terminate."""
    if action["type"] == "tool_call":
        return [action]
    if action["type"] == "tool_calls":
        return cast(list[Mapping[str, Any]], action.get("calls") or [])
    return []

"""`AgentPolicy`, the interface of agents.

All episodes of a run share one policy object. `open` returns the session of one episode with its per-episode state,
such as a random generator, a position or a KV slot. The worker acts through the session and closes it. A policy without
per-episode state returns itself from `open` (the default) and is closed at the end of the run.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import pydantic

from reward_kit.agent.message_actions import parse_action
from reward_kit.environments.base import ForkableResource, ToolSpec
from reward_kit.errors import PolicyError, ProviderError, RewardKitError, boundary, type_name
from reward_kit.models import Message
from reward_kit.providers.faults import AccessError, TransientError, client_errors
from reward_kit.providers.request_queue import RetryPolicy, with_retries
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION

if TYPE_CHECKING:
    from reward_kit.providers.completion import ChatCompletion

_JITTER = random.Random(0)

Action = dict[str, Any]
"""One of `{"type": "text", "content"}`, `{"type": "tool_call", "name", "arguments", "id"?, "content"?}`,
`{"type": "tool_calls", "calls": [{"name", "arguments", "id"?}, …], "content"?}` and
`{"type": "terminate", "content"?}`.

`arguments` is a mapping. Arguments that are not a JSON object are stored verbatim as `arguments_text` instead, and
answered with a tool error. A policy that runs its own loop, such as an agent of another framework, may add `results`
(the chat messages that followed the answer; its calls are not executed again), `prompt_messages` (the model's input if
it differs from the conversation), and `is_final`, which ends the episode.
"""


class ToolAnswer(NamedTuple):
    """The result of a call that the policy executed: the text, and whether the episode ends with this step."""

    text: str
    is_over: bool


OWN_ACCOUNT = ("results", "prompt_messages", "is_final")
"""Keys of an action that describe calls executed by the policy itself; recorded in messages and outputs."""


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """The data about an episode that is passed to its session.

    Attributes:
        rollout_id: the id of the episode, unique in a run.
        seed: the seed for all randomness in the policy; never shared between episodes.
        resource: the episode's live resource; None if the task has only tools. For experts; models must not use it.
        sample_id: the id of the sample.
        rollout_index: the episode's position in its group, from 0.
        call_tool: calls a tool while `get_action` runs, one call at a time. The calls are recorded on the step whose
            action is returned next; with `results` in that action, their results become messages. Arguments are a
            mapping, or text that is not a JSON object. None outside of an episode.
    """

    rollout_id: str
    seed: int
    resource: ForkableResource | None = None
    sample_id: str = ""
    rollout_index: int = 0
    call_tool: Callable[[str, Mapping[str, Any] | str], Awaitable[ToolAnswer]] | None = None


class PolicyOutput(NamedTuple):
    """An action of a policy. A plain 4-tuple in this order is also accepted.

    Attributes:
        action_structured: the action; see `Action`.
        raw_policy_output: the text as written by the model, if any.
        log_probs: a mapping with these keys; unknown values are omitted. `prompt_ids` (P,), `token_ids` (N,),
            `logprobs` (N,) of the sampling distribution, `policy_version`, `usage` (`prompt_tokens`,
            `completion_tokens`, `cost`), `finish_reason`, `segment_reason` (why `prompt_ids` rewrites the context), and
            `allowed_ids` (N,), the ids that a constraint allowed at each token or None for any.
        value_estimate: V(s) in the units of the return, if the policy has a critic.
    """

    action_structured: Action
    raw_policy_output: str | None = None
    log_probs: dict[str, Any] | None = None
    value_estimate: float | None = None

    @classmethod
    def from_chat_completion(cls, completion: Any, *, value_estimate: float | None = None) -> PolicyOutput:
        """Convert the first choice of a chat completion, with its text or tool calls, reasoning and token data.

        Args:
            completion: a `ChatCompletion` of the openai package, or its JSON as a mapping.
            value_estimate: V(s) in the units of the return, if the policy has a critic.

        Raises:
            PolicyError: `completion` has another type.
            ProviderError: the completion has no choice, or its message is malformed.
        """
        from reward_kit.providers.completion import RequestFacts, read_completion

        data = completion.model_dump(warnings=False) if isinstance(completion, pydantic.BaseModel) else completion
        if not isinstance(data, Mapping):
            raise PolicyError(f"completion must be a ChatCompletion or a mapping, got {type_name(completion)}")
        read = read_completion(data, RequestFacts("the chat completion", str(data.get("model") or ""), None))
        return policy_output(read)._replace(value_estimate=value_estimate)


class AgentPolicy(ABC):
    """The base class of agents; subclass it to run your own agent in an episode.

    Attributes:
        path_options: constructor parameters that are paths, relative to the task file.
        maybe_path_options: constructor parameters that are a path or a name. They are relative to the task file if
            that path exists or if they begin with a dot.
        object_options: constructor parameters written as file.py:name in a task file, relative to it; the objects are
            loaded.
        is_free: whether actions are free of charge, so that cost limits do not apply.
    """

    path_options: ClassVar[tuple[str, ...]] = ()
    maybe_path_options: ClassVar[tuple[str, ...]] = ()
    object_options: ClassVar[tuple[str, ...]] = ()
    is_free: ClassVar[bool] = False

    @property
    def knows_cost(self) -> bool:
        """True if the reported usage of actions includes their cost, as a cost limit requires."""
        return self.is_free

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return the session of one episode, by default the policy itself."""
        return self

    @abstractmethod
    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Choose the next action.

        Args:
            observation: the whole conversation so far, read-only, including the new messages at its end.
            available_tools_specs: the tools that can be called now, in OpenAI format, or None.
        """

    async def on_episode_end(self, messages: Sequence[Message]) -> None:
        """Inspect the conversation of a successful episode before `close`; an error here fails the episode."""
        return

    async def close(self) -> None:
        """Release resources. Called once: for a session after its episode, even if it failed; for a policy at the end
        of the run.
        """
        return


async def open_session(policy: AgentPolicy, context: EpisodeContext) -> AgentPolicy:
    """Open a session of `policy` for an episode; raise a PolicyError if `open` returns an invalid value."""
    try:
        with client_errors(f"the endpoint of {type(policy).__name__}"):
            session = await _await_result(policy.open(context), "open")
    except (TransientError, AccessError) as error:
        raise ProviderError(str(error)) from error
    if not hasattr(session, "get_action"):
        raise PolicyError(f"open must return an AgentPolicy, the session for this episode, got {session!r:.80}")
    return cast(AgentPolicy, session)


async def next_action(
    session: AgentPolicy,
    conversation: Sequence[Message],
    specs: list[ToolSpec] | None,
    *,
    label: str = "the policy",
    has_acted: Callable[[], bool] = lambda: False,
) -> PolicyOutput:
    """Return the session's next action.

    If a model client inside `get_action` fails temporarily, `get_action` is called again with the same arguments, after
    the same waits as for the run's own endpoints.

    Args:
        session: the session of the policy.
        conversation: the conversation so far.
        specs: the tool specifications.
        label: the policy's name, for messages; its requests share one queue.
        has_acted: returns True if `get_action` called tools; if so, it is not called again.

    Raises:
        PolicyError: `get_action` returned an invalid value.
        ProviderError: a model client failed permanently or exhausted its retries.
        LimitError: the conversation no longer fits the model.
    """

    async def act() -> PolicyOutput:
        with client_errors(f"the endpoint of {label}"):
            return check_output(await _await_result(session.get_action(conversation, specs), "get_action"))

    try:
        return await act()
    except (TransientError, AccessError) as error:
        if error.__cause__ is None or isinstance(error.__cause__, RewardKitError):
            raise  # the package's own endpoints have already retried
        first = error
    failures: list[ProviderError] = [first]

    async def attempt() -> PolicyOutput:
        if isinstance(first, TransientError) and has_acted():
            raise ProviderError(f"{first}; not retried, because get_action had already called tools") from first
        if failures:
            raise failures.pop()
        return await act()

    traffic = CURRENT_PROVIDER_SESSION.get()
    permit = traffic.queue(label, "policy").permit(0) if traffic is not None else None
    try:
        output, _ = await with_retries(attempt, RetryPolicy(), _JITTER, permit)
        if permit is not None:
            permit.answered()
        return output
    except AccessError as error:
        await asyncio.sleep(0)  # let a run that stops for this reason stop before it counts a failure
        raise ProviderError(str(error)) from error
    finally:
        if permit is not None:
            permit.leave()


def policy_output(completion: ChatCompletion) -> PolicyOutput:
    """Return a chat completion as a policy output; `log_probs` contains only the values sent by the endpoint."""
    message, usage = completion.message, completion.usage
    facts: dict[str, Any] = {
        "prompt_ids": completion.prompt_ids,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
    }
    if usage:
        facts["usage"] = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        if usage.cached_tokens:
            facts["usage"]["cached_tokens"] = usage.cached_tokens
        if usage.cost is not None:
            facts["usage"]["cost"] = usage.cost
    facts["finish_reason"] = completion.finish_reason
    raw = message.text if message.text or not message.tool_calls else None
    return PolicyOutput(parse_action(message), raw, {key: value for key, value in facts.items() if value is not None})


async def _await_result(result: object, method: str) -> object:
    if not inspect.isawaitable(result):
        raise PolicyError(f"{method} must be a coroutine function; define it with `async def {method}`")
    return await result


_MESSAGES = pydantic.TypeAdapter(list[Message])
ACTION_TYPES = ("text", "tool_call", "tool_calls", "terminate")


def check_output(output: object) -> PolicyOutput:
    """Return `output` as a `PolicyOutput`; raise a PolicyError if a part of it is invalid."""
    if not isinstance(output, PolicyOutput):
        if not isinstance(output, tuple) or len(output) != 4:
            raise PolicyError(f"get_action must return a PolicyOutput or a 4-tuple, got {type(output).__name__}")
        output = PolicyOutput(*output)
    if not isinstance(output.raw_policy_output, str | None):
        raise PolicyError(f"raw_policy_output must be text or None, got {output.raw_policy_output!r}")
    if not isinstance(output.value_estimate, numbers.Real | None):
        raise PolicyError(f"value_estimate must be a number or None, got {output.value_estimate!r}")
    if output.log_probs is not None:
        _check_log_probs(output.log_probs)
    action: Any = output.action_structured
    kind = action.get("type") if isinstance(action, dict) else None
    if kind not in ACTION_TYPES:
        raise PolicyError(f"invalid action {action!r}: its type must be one of {', '.join(ACTION_TYPES)}")
    if kind == "text" and not isinstance(action.get("content"), str):
        raise PolicyError(f"a text action needs a 'content' string, got {action!r}")
    for key in ("content", "reasoning_content"):
        if not isinstance(action.get(key), str | None):
            raise PolicyError(f"{key!r} of an action must be text or None, got {action[key]!r}")
    if kind == "tool_calls" and not (isinstance(action.get("calls"), list | tuple) and action["calls"]):
        raise PolicyError(f"a tool_calls action needs 'calls', a list of at least one call, got {action!r}")
    for key in ("results", "prompt_messages"):
        if key in action:
            with boundary(PolicyError, f"{key!r} of an action must be a list of chat messages"):
                _MESSAGES.validate_python(action[key])
    for call in get_tool_calls(action):
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise PolicyError(f"a tool call needs a 'name' string, got {call!r}")
    return output


def _check_log_probs(log_probs: Any) -> None:
    if not isinstance(log_probs, Mapping) or not isinstance(log_probs.get("usage"), Mapping | None):
        raise PolicyError(f"log_probs and its usage must be mappings, got {log_probs!r}")
    if not isinstance(log_probs.get("policy_version"), int | None):
        raise PolicyError(f"policy_version must be an integer, got {log_probs['policy_version']!r}")
    token_ids, logprobs = log_probs.get("token_ids"), log_probs.get("logprobs")
    if token_ids is not None and logprobs is not None and len(token_ids) != len(logprobs):
        raise PolicyError(f"{len(token_ids)} token_ids but {len(logprobs)} logprobs")
    with boundary(PolicyError, "prompt_ids and token_ids must be 32-bit integers, and logprobs numbers"):
        for typecode, values in (("i", log_probs.get("prompt_ids")), ("i", token_ids), ("d", logprobs)):
            if values is not None and (typecode == "i" or token_ids is not None):
                array(typecode, values)


def get_tool_calls(action: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tool calls of an action, in order; [] for text and terminate."""
    if action["type"] == "tool_call":
        return [action]
    return cast(list[Mapping[str, Any]], action.get("calls") or []) if action["type"] == "tool_calls" else []

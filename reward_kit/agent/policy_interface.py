"""`AgentPolicy`, the interface of agents.

All episodes of a run share one policy. Its `open` method returns a session for one episode. The session holds the state
of that episode, such as a random generator, a position or a KV slot. The worker requests actions from the session and
closes it. By default, `open` returns the policy itself, which is sufficient for a policy without such state. The policy
is closed at the end of the run.
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
from reward_kit.display_text import first_difference
from reward_kit.environments.base import ForkableResource, ToolSpec
from reward_kit.episodes.json_codec import to_json_value
from reward_kit.errors import PolicyError, ProviderError, RewardKitError, boundary, type_name
from reward_kit.models import PROVIDER_ITEMS, Message
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
answered with a tool error. A policy that runs its own loop, such as an agent from a different framework, may add
`results` (the chat messages that followed the answer; the action's calls are not executed again), `prompt_messages`
(the model's input if it differs from the conversation), and `is_final`, which ends the episode.
"""


class ToolAnswer(NamedTuple):
    """The result of a call that the policy executed itself.

    The flag is True if the episode ends with this step.
    """

    text: str
    is_over: bool


OWN_ACCOUNT = ("results", "prompt_messages", "is_final")
"""The keys of an action that describe calls executed by the policy itself. Messages and outputs record them."""


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """The data about an episode that a policy receives when it opens a session.

    Attributes:
        rollout_id: the id of the episode, unique in a run.
        seed: the seed for all randomness in the policy. No two episodes share a seed.
        resource: the live resource of the episode, which is meant for experts and must not be used by a model. It is
            None if the task has only tools.
        sample_id: the id of the sample.
        rollout_index: the position of the episode in its group, from 0.
        call_tool: a function that calls a tool while `get_action` runs, one call at a time. The arguments are a
            mapping, or a string if they are not a JSON object. The calls are recorded in the step of the action that is
            returned next. If that action has `results`, the results of the calls become messages. `call_tool` is `None`
            outside an episode.
    """

    rollout_id: str
    seed: int
    resource: ForkableResource | None = None
    sample_id: str = ""
    rollout_index: int = 0
    call_tool: Callable[[str, Mapping[str, Any] | str], Awaitable[ToolAnswer]] | None = None


class PolicyOutput(NamedTuple):
    """An action of a policy. A plain tuple of the four values in this order is also accepted.

    Attributes:
        action_structured: the action; see `Action`.
        raw_policy_output: the text that the model wrote, if any.
        log_probs: a mapping with any of these keys: `prompt_ids` (P,), the token ids of the prompt; `token_ids` (N,),
            the sampled token ids; `logprobs` (N,), their log-probabilities under the sampling distribution;
            `policy_version`; `usage` (`prompt_tokens`, `completion_tokens`, `cost`); `finish_reason`; `segment_reason`,
            the reason why `prompt_ids` rewrites the context; and `allowed_ids` (N,), the ids that a constraint allowed
            for each token, or None if it allowed any id. Unknown values are omitted.
        value_estimate: V(s), in the same units as the return, if the policy has a critic.
    """

    action_structured: Action
    raw_policy_output: str | None = None
    log_probs: dict[str, Any] | None = None
    value_estimate: float | None = None

    @classmethod
    def from_chat_completion(cls, completion: Any, *, value_estimate: float | None = None) -> PolicyOutput:
        """Convert the first choice of a chat completion, including its text or tool calls, reasoning and token data.

        Args:
            completion: a `ChatCompletion` from the openai package, or its JSON as a mapping.
            value_estimate: V(s), in the same units as the return, if the policy has a critic.

        Raises:
            PolicyError: If `completion` has the wrong type.
            ProviderError: If the completion has no choices or its message is malformed.
        """
        from reward_kit.providers.completion import RequestFacts, read_completion

        data = completion.model_dump(warnings=False) if isinstance(completion, pydantic.BaseModel) else completion
        if not isinstance(data, Mapping):
            raise PolicyError(f"completion must be a ChatCompletion or a mapping, got {type_name(completion)}")
        read = read_completion(data, RequestFacts("the chat completion", str(data.get("model") or ""), None))
        return policy_output(read)._replace(value_estimate=value_estimate)


class PastTurn(NamedTuple):
    """An earlier turn of an episode that a session continues.

    Attributes:
        observation: the conversation before the action.
        tools: the tools that could be called.
        output: the recorded action, including its text and, if known, its tokens.
    """

    observation: Sequence[Message]
    tools: list[ToolSpec] | None
    output: PolicyOutput


class AgentPolicy(ABC):
    """The base class of agents. Subclass it to run your own agent in an episode.

    Attributes:
        path_options: the constructor parameters that are paths relative to the task file.
        maybe_path_options: the constructor parameters that are either a path or a name. A value is interpreted as a
            path relative to the task file if it starts with a dot or if that path exists.
        object_options: the constructor parameters that a task file specifies as file.py:name, relative to the task
            file. The constructor receives the loaded object.
        is_free: True if actions are free of charge, so cost limits do not apply.
    """

    path_options: ClassVar[tuple[str, ...]] = ()
    maybe_path_options: ClassVar[tuple[str, ...]] = ()
    object_options: ClassVar[tuple[str, ...]] = ()
    is_free: ClassVar[bool] = False

    @property
    def knows_cost(self) -> bool:
        """True if an action's reported usage includes the cost, which a cost limit requires."""
        return self.is_free

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return the session of one episode. By default, this is the policy itself."""
        return self

    @abstractmethod
    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Choose the next action.

        Args:
            observation: the whole conversation so far, with the new messages at the end. It must not be modified.
            available_tools_specs: the tools that can be called now, in OpenAI format, or None.
        """

    async def resume(self, turns: Sequence[PastTurn]) -> None:
        """Continue an episode as if this session had already taken these turns.

        This method is called once on the session that `open` returned when a new episode continues a recorded episode.
        It is not called on a policy that is its own session, because such a policy has no state. By default,
        `get_action` is called for each turn and must return the recorded action. A session that calls a model or draws
        random numbers should override this method. If such a session needs nothing but the conversation, the method can
        simply `return`.

        Args:
            turns: the earlier turns, taken by this policy or by a different policy.

        Raises:
            PolicyError: If the session cannot continue these turns.
        """
        for number, turn in enumerate(turns):
            output = check_output(await self.get_action(turn.observation, turn.tools))
            now = {key: value for key, value in output.action_structured.items() if key not in OWN_ACCOUNT}
            if difference := first_difference(
                to_json_value(turn.output.action_structured), to_json_value(now), f"action {number}"
            ):
                raise PolicyError(
                    f"{type(self).__name__} cannot continue this episode, because it does not repeat the recorded "
                    f"actions{difference}; define resume(turns) to set the state of the session"
                )

    async def on_episode_end(self, messages: Sequence[Message]) -> None:
        """Inspect the conversation of a successful episode. This method is called before `close`.

        If it raises an error, the episode fails.
        """
        return

    async def close(self) -> None:
        """Release all resources.

        A session is closed after its episode, even if the episode failed. A policy is closed at the end of the run.
        Each is closed only once.
        """
        return


async def open_session(policy: AgentPolicy, context: EpisodeContext) -> AgentPolicy:
    """Open a session of a policy for an episode.

    Raises:
        PolicyError: If `open` does not return a policy.
        ProviderError: If a model client failed in `open`.
    """
    try:
        with client_errors(f"the endpoint of {type(policy).__name__}"):
            session = await _await_result(policy.open(context), "open")
    except (TransientError, AccessError) as error:
        raise ProviderError(str(error)) from error
    if not hasattr(session, "get_action"):
        raise PolicyError(f"open must return an AgentPolicy, the session for this episode; got {session!r:.80}")
    return cast(AgentPolicy, session)


async def next_action(
    session: AgentPolicy,
    conversation: Sequence[Message],
    specs: list[ToolSpec] | None,
    *,
    label: str = "the policy",
    has_acted: Callable[[], bool] = lambda: False,
) -> PolicyOutput:
    """Return the next action of a session.

    If a model client fails temporarily in `get_action`, `get_action` is called again with the same arguments. The
    delays between these calls are the same as for requests that this package sends.

    Args:
        session: the session of the policy.
        conversation: the conversation so far.
        specs: the specifications of the tools.
        label: the name of the policy in messages. All requests with the same label share one queue.
        has_acted: a function that returns True if `get_action` has called tools. In that case, `get_action` is not
            called again.

    Raises:
        PolicyError: If `get_action` returned an invalid value.
        ProviderError: If a model client failed permanently, or still failed after all retries.
        LimitError: If the conversation no longer fits into the context of the model.
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
            raise ProviderError(f"{first}; get_action was not retried, because it had already called tools") from first
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
    """Convert a chat completion to a policy output. Its `log_probs` contain only values that the endpoint sent."""
    message, usage = completion.message, completion.usage
    facts: dict[str, Any] = {
        "prompt_ids": completion.prompt_ids,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "weight_versions": completion.weight_versions,
    }
    if usage:
        facts["usage"] = usage.to_json()
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
    """Validate the value that `get_action` returned, and return it as a `PolicyOutput`.

    Raises:
        PolicyError: If a part of the value is invalid.
    """
    if not isinstance(output, PolicyOutput):
        if not isinstance(output, tuple) or len(output) != 4:
            raise PolicyError(f"get_action must return a PolicyOutput or a 4-tuple, got {type(output).__name__}")
        output = PolicyOutput(*output)
    if not isinstance(output.raw_policy_output, str | None):
        raise PolicyError(f"raw_policy_output must be a string or None, got {output.raw_policy_output!r}")
    if not isinstance(output.value_estimate, numbers.Real | None):
        raise PolicyError(f"value_estimate must be a number or None, got {output.value_estimate!r}")
    if output.log_probs is not None:
        _check_log_probs(output.log_probs)
    action: Any = output.action_structured
    kind = action.get("type") if isinstance(action, dict) else None
    if kind not in ACTION_TYPES:
        raise PolicyError(f"invalid action {action!r}: its type must be one of {', '.join(ACTION_TYPES)}")
    if kind == "text" and not isinstance(action.get("content"), str):
        raise PolicyError(f"a text action needs a string 'content', got {action!r}")
    for key in ("content", "reasoning_content"):
        if not isinstance(action.get(key), str | None):
            raise PolicyError(f"{key!r} of an action must be a string or None, got {action[key]!r}")
    if not isinstance(action.get(PROVIDER_ITEMS, {}), dict):
        raise PolicyError(f"{PROVIDER_ITEMS!r} of an action must be a dict, got {action[PROVIDER_ITEMS]!r}")
    if kind == "tool_calls" and not (isinstance(action.get("calls"), list | tuple) and action["calls"]):
        raise PolicyError(f"a tool_calls action needs 'calls', a non-empty list of calls, got {action!r}")
    for key in ("results", "prompt_messages"):
        if key in action:
            with boundary(PolicyError, f"{key!r} of an action must be a list of chat messages"):
                _MESSAGES.validate_python(action[key])
    for call in get_tool_calls(action):
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise PolicyError(f"a tool call needs a string 'name', got {call!r}")
    return output


def _check_log_probs(log_probs: Any) -> None:
    if not isinstance(log_probs, Mapping) or not isinstance(log_probs.get("usage"), Mapping | None):
        raise PolicyError(f"log_probs and its usage must be mappings, got {log_probs!r}")
    if not isinstance(log_probs.get("policy_version"), int | None):
        raise PolicyError(f"policy_version must be an integer, got {log_probs['policy_version']!r}")
    token_ids, logprobs = log_probs.get("token_ids"), log_probs.get("logprobs")
    if token_ids is not None and logprobs is not None and len(token_ids) != len(logprobs):
        raise PolicyError(f"log_probs has {len(token_ids)} token_ids but {len(logprobs)} logprobs")
    with boundary(PolicyError, "prompt_ids and token_ids must be 32-bit integers, and logprobs must be numbers"):
        for typecode, values in (("i", log_probs.get("prompt_ids")), ("i", token_ids), ("d", logprobs)):
            if values is not None and (typecode == "i" or token_ids is not None):
                array(typecode, values)


def get_tool_calls(action: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tool calls of an action in order. The list is empty for a text or terminate action."""
    if action["type"] == "tool_call":
        return [action]
    return cast(list[Mapping[str, Any]], action.get("calls") or []) if action["type"] == "tool_calls" else []

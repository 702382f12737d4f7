"""`OwnAgentPolicy`, which runs an agent that has its own loop and records its model requests.

The agent of each episode receives the private URL of a `RecordingEndpoint`, which forwards its requests to the real
model. The agent may use any framework and does not need to use any code from this package. The agent and the worker run
in separate tasks and take turns: while `get_action` runs, only the agent may use the episode's environment; at all
other times, only the worker may use it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import inspect
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.agent.policy_interface import (
    Action,
    AgentPolicy,
    EpisodeContext,
    PastTurn,
    PolicyOutput,
    get_tool_calls,
    policy_output,
)
from reward_kit.agent.recording import ChatMessage, ChatRequest, RecordedAnswer, RecordingEndpoint, ServedModel
from reward_kit.agent.tool_execution import NOT_EXECUTED
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, EpisodeError, PolicyError, RewardKitError, boundary, type_name
from reward_kit.loading import load_object
from reward_kit.models import PROVIDER_ITEMS, Message
from reward_kit.run_warnings import warn_once
from reward_kit.safe_input import parse_json

logger = logging.getLogger("reward_kit.agent")
_AGENT_CODE = "the agent's own code"
_OVER = "the episode is over, because its task ended or a limit was reached"
_SPARE_SECONDS = 0.1
_END_SECONDS = 10.0


@dataclass(slots=True)
class AgentTask:
    """The task that an agent receives for one episode.

    Attributes:
        messages: the conversation so far in the chat format, usually a system message and a user message.
        tools: the specifications, in OpenAI format, of the tools that could be called through `call_tool` at the time
            of the latest model request. The list may be empty.
        call_tool: a function that calls a tool of the environment: `await call_tool(name, arguments)` returns the
            result as text. Omit `await` in an agent that is a plain function. The arguments are a mapping or the JSON
            text that the model wrote. The function raises an EpisodeError once the episode is over.
        model: the name of the model. Requests may use any name.
        sample_id: the id of the sample.
        rollout_id: the id of the episode.
        seed: the seed for all randomness in the agent, unique to the episode.
    """

    messages: list[ChatMessage]
    tools: list[ToolSpec]
    call_tool: Callable[..., Any]
    model: str
    sample_id: str
    rollout_id: str
    seed: int

    @property
    def prompt(self) -> str:
        """The text of the last user message, or ""."""
        asked = [message for message in self.messages if message["role"] == "user"]
        return Message.model_validate(asked[-1]).text if asked else ""


def callable_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or the representation of any other callable."""
    return getattr(function, "__name__", None) or repr(function)


Agent = Callable[[AgentTask, str], Any]
"""`async def agent(task, base_url)`, or a plain function, which runs in a separate thread.

`base_url` ends in `/v1` and accepts chat completions, Responses and Messages, with any key.
It returns the final answer as text, or None if the final answer is the model's last answer.
"""


class OwnAgentPolicy(AgentPolicy):
    """A policy that runs an agent and records every model response that the agent receives as one action.

    An action is complete when the agent sends its next request or ends. What the agent does in between, including its
    tool calls, is recorded in the action's `results`. A policy's time limits therefore include this work. The agent is
    stopped when its episode ends.

    Args:
        agent: the agent, or `file.py:function`; see `Agent`.
        model: the name of the model at the real endpoint.
        **options: the other options of `OpenAIAgentPolicy`. They configure the real endpoint and override keys of the
            agent's requests.

    Raises:
        ConfigError: If the agent cannot be loaded or called, or an option is invalid.
    """

    path_options = OpenAIAgentPolicy.path_options
    object_options = ("agent",)

    def __init__(self, agent: Agent | str, model: str, **options: Any) -> None:
        function = load_object(agent) if isinstance(agent, str) else agent
        if not callable(function):
            raise ConfigError(f"agent must be a function of the task and the base URL, got {function!r}")
        try:
            inspect.signature(function).bind(None, "")
        except TypeError as error:
            raise ConfigError(
                f"agent: {callable_name(function)} cannot be called with the task and the base URL: {error}"
            ) from error
        except ValueError:
            logger.debug("cannot read the signature of %r", function)
        self._agent: Agent = function
        self._model = model
        self._upstream = OpenAIAgentPolicy(model, **options)
        self._endpoint = RecordingEndpoint(ServedModel(model, self._upstream.api, self._upstream.has_logprobs))
        self._has_warned = False

    def __repr__(self) -> str:
        return f"OwnAgentPolicy({callable_name(self._agent)!r}, {self._upstream!r})"

    @property
    def knows_cost(self) -> bool:
        """True if the usage in a response from the real endpoint includes the cost."""
        return self._upstream.knows_cost

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Open the session of one episode. Each session has a separate base URL.

        The first `get_action` starts the agent.
        """
        session = _AgentSession(
            self._agent, self._model, self._upstream, self._endpoint, context, self._warn_of_unused_url
        )
        session.base_url = await self._endpoint.open(session.answer)
        return session

    def _warn_of_unused_url(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_once(
                logger,
                f"the agent {callable_name(self._agent)} sent no model request to base_url in an episode, so its "
                "tokens and cost are unknown. If it calls a model, pass base_url to its client",
            )

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Raise a `PolicyError`, because an agent acts only in an episode. Use the session that `open` returns."""
        raise PolicyError("own_agent cannot act outside an episode; open a session first")

    async def close(self) -> None:
        """Stop the recording endpoint and close the connections to the real endpoint."""
        try:
            await self._endpoint.close()
        finally:
            await self._upstream.close()


# The signature lists the names accepted in `**options`, so that typos are rejected.
_parameters = [
    *inspect.signature(OwnAgentPolicy.__init__).parameters.values(),
    *inspect.signature(OpenAIAgentPolicy).parameters.values(),
]
_named = {parameter.name: parameter for parameter in _parameters if parameter.kind is not parameter.VAR_KEYWORD}
OwnAgentPolicy.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    sorted(_named.values(), key=lambda parameter: parameter.kind)
)


@dataclass(slots=True)
class CallMade:
    """A tool call that the agent made in its episode's environment, and the result of the call."""

    name: str
    answer: str


class _AgentSession(AgentPolicy):
    """One run of an agent. `endpoint` receives the agent's requests, and the model `upstream` answers them."""

    def __init__(
        self,
        agent: Agent,
        model: str,
        upstream: OpenAIAgentPolicy,
        endpoint: RecordingEndpoint,
        context: EpisodeContext,
        warn_of_unused_url: Callable[[], None],
    ) -> None:
        self._agent, self._model, self._upstream = agent, model, upstream
        self._endpoint, self._context = endpoint, context
        self._warn_of_unused_url = warn_of_unused_url
        self._has_asked = False
        self.base_url = ""
        self._tools: list[ToolSpec] = []
        self._running: asyncio.Task[str | None] | None = None
        self._requests: dict[asyncio.Future[RecordedAnswer], ChatRequest] = {}
        self._unanswered: set[asyncio.Future[RecordedAnswer]] = set()
        self._moved = asyncio.Event()
        self._environment = asyncio.Lock()
        self._is_workers = False  # the worker may use the environment
        self._calling: asyncio.Task[Any] | None = None
        self._is_over = False
        self._made: list[CallMade] = []  # calls made after the model's last answer
        self._answers = 0
        self._conversation: list[ChatMessage] = []  # as recorded so far
        self._given_answers: dict[
            str, list[ChatMessage]
        ] = {}  # keyed by the part of them that a client of any API sends back

    async def answer(self, request: ChatRequest) -> RecordedAnswer:
        """Wait until the agent may continue, and return the model's response to the agent's request."""
        self._has_asked = True
        if self._is_over:
            raise EpisodeError(_OVER)
        answer: asyncio.Future[RecordedAnswer] = asyncio.get_running_loop().create_future()
        self._requests[answer] = request
        self._unanswered.add(answer)
        self._moved.set()
        try:
            return await answer
        finally:
            self._unanswered.discard(answer)
            self._requests.pop(answer, None)  # the agent disconnected before its turn

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Answer the agent's next request, and record how the agent uses the response.

        Raises:
            PolicyError: If the agent failed.
        """
        self._tools[:] = available_tools_specs or []
        if self._running is None:
            self._conversation = [message.to_chat() for message in observation]
            self._running = asyncio.create_task(self._run(), name=f"agent of {self._context.rollout_id}")
            self._running.add_done_callback(lambda _: self._moved.set())
        else:
            self._environment.release()
        self._is_workers = False
        try:
            return await self._next_action()
        finally:
            await self._environment.acquire()
            self._is_workers = True

    async def resume(self, turns: Sequence[PastTurn]) -> None:
        """Raise a PolicyError, because the agent's loop cannot start in the middle of an episode."""
        raise PolicyError("an agent with its own loop cannot continue a recorded episode; use a different policy")

    async def close(self) -> None:
        """Stop the agent and reject further requests and calls. A thread that hangs is abandoned."""
        self._is_over = True
        self._endpoint.forget(self.base_url)
        for answer in self._unanswered:
            if not answer.done():
                answer.set_exception(EpisodeError(_OVER))
        if self._running is None:
            return
        if self._is_workers:
            self._environment.release()
        tasks = {self._running, *({self._calling} if self._calling is not None else ())}
        for task in tasks:
            task.cancel()
        _, left = await asyncio.wait(tasks, timeout=_END_SECONDS)
        if left:
            logger.warning("the agent of %s is still running after the end of its episode", self._context.rollout_id)
        elif not self._running.cancelled() and (error := self._running.exception()) is not None:
            logger.debug("the agent of %s ended with its episode", self._context.rollout_id, exc_info=error)

    async def _run(self) -> str | None:
        context, agent, loop = self._context, self._agent, asyncio.get_running_loop()
        is_async = inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__)

        def call_tool_blocking(name: str, arguments: Mapping[str, Any] | str | None = None) -> str:
            return asyncio.run_coroutine_threadsafe(self._call_tool(name, arguments), loop).result()

        task = AgentTask(
            messages=copy.deepcopy(self._conversation),
            tools=self._tools,
            call_tool=self._call_tool if is_async else call_tool_blocking,
            model=self._model,
            sample_id=context.sample_id,
            rollout_id=context.rollout_id,
            seed=context.seed,
        )
        with boundary(PolicyError, _AGENT_CODE):
            result = await (agent(task, self.base_url) if is_async else _run_in_thread(agent, task, self.base_url))
        if not isinstance(result, str | None):
            raise PolicyError(f"the agent must return a string or None, got {type_name(result)}")
        return result

    async def _call_tool(self, name: str, arguments: Mapping[str, Any] | str | None = None) -> str:
        """Call a tool of the environment if the agent may currently use the environment."""
        if isinstance(arguments, str):
            try:
                read = parse_json(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                read = None
            if isinstance(read, dict):  # pass other text unchanged, so that the tool rejects it
                arguments = read
        async with self._environment:
            if self._is_over or self._context.call_tool is None:
                raise EpisodeError(_OVER)
            self._calling = asyncio.current_task()
            try:
                answer = await self._context.call_tool(name, {} if arguments is None else arguments)
            finally:
                self._calling = None
            self._made.append(CallMade(name, answer.text))
            if answer.is_over:
                self._is_over = True
                self._moved.set()
            return answer.text

    async def _next_action(self) -> PolicyOutput:
        await self._wait_for_agent()
        if self._is_over or self._has_ended():
            return self._closing_action()
        waiting, request = next(iter(self._requests.items()))
        del self._requests[waiting]
        given = request.messages
        if request.api != self._upstream.api:
            given = self._with_exact_answers(given)
        # Use a new seed for each turn, so that an agent that repeats a request can get a different answer.
        seed = self._context.seed + self._answers
        self._answers += 1
        completion = await self._upstream.complete(
            {**request.options, "messages": given}, seed, self._context.rollout_id
        )
        output = policy_output(completion)
        action = output.action_structured
        if not same_conversation(self._conversation, given):
            action["prompt_messages"] = _without_items(given)
        self._made = []
        if not waiting.done():
            answer_id = f"{self._context.rollout_id}-{self._answers}"
            waiting.set_result(RecordedAnswer(completion, answer_id, self._model))
        # Stop shortly before the worker's deadline, so that the answer is recorded even if the agent works too long.
        with anyio.CancelScope(deadline=anyio.current_effective_deadline() - _SPARE_SECONDS):
            await self._wait_for_agent()
        answer = completion.message.to_chat()
        self._given_answers.setdefault(_answer_key(answer), []).append(answer)
        results = None
        if self._requests and not self._is_over:
            results = read_results(given, answer, next(iter(self._requests.values())).messages)
        if results is None:
            results = results_of_calls(action, self._made, self._is_over)
        action["results"] = results = _without_items(results)
        self._conversation = [*given, answer, *results]
        self._made = []
        ended = self._running
        if ended is not None and ended.done() and not ended.cancelled() and ended.exception() is None:
            text = ended.result()  # the agent's final answer, which may repeat the model's last one
            if text is None or text.strip() == completion.message.text.strip():
                action["is_final"] = True
        return output

    def _with_exact_answers(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the messages with the model's responses exactly as the model wrote them.

        The agent's API may be unable to express the exact text and reasoning of a response. Responses that look
        identical are matched by their order.
        """
        exact, seen = [], Counter[str]()
        for message in messages:
            key = _answer_key(message) if message["role"] == "assistant" else ""
            answers = self._given_answers.get(key, [message])
            exact.append(answers[min(seen[key], len(answers) - 1)])
            seen[key] += 1
        return exact

    async def _wait_for_agent(self) -> None:
        """Wait until the agent sends a request or ends, or until the episode is over."""
        while not (self._requests or self._is_over or self._has_ended()):
            self._moved.clear()
            await self._moved.wait()

    def _closing_action(self) -> PolicyOutput:
        """Return the last action of an agent whose final answer the model did not write."""
        text = None
        if self._has_ended():
            assert self._running is not None
            with boundary(PolicyError, _AGENT_CODE):
                text = self._running.result()
        action: Action = {"type": "terminate", **({"content": text} if text else {})}
        if self._made:  # the agent never called the model, so its tool calls come before its only action
            called = results_of_calls(action, self._made, self._is_over)
            action |= {"prompt_messages": [*self._conversation, *called], "results": []}
        if not self._has_asked:  # the agent may have used a model elsewhere
            self._warn_of_unused_url()
            return PolicyOutput(action, text)
        # The action was free; report a cost of 0 if costs are known.
        facts = {"usage": {"cost": 0.0}} if self._upstream.knows_cost else None
        return PolicyOutput(action, text, facts)

    def _has_ended(self) -> bool:
        return self._running is not None and self._running.done()


async def _run_in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a plain function in a separate thread. The thread continues even if the task that awaits it is cancelled.

    In a thread pool, episodes would be delayed while all threads wait for a model, and one hanging thread would prevent
    the program from exiting.
    """
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # cancelling the waiting task does not cancel a running call

    def work() -> None:
        try:
            with boundary(PolicyError, _AGENT_CODE):
                result = function(*arguments)
        except (RewardKitError, asyncio.CancelledError) as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=work, name=f"reward-kit {function!r}", daemon=True).start()
    return await asyncio.wrap_future(done)


def read_results(
    given: Sequence[ChatMessage], answer: ChatMessage, later: Sequence[ChatMessage]
) -> list[ChatMessage] | None:
    """Return the messages that follow the response to `given` in a later request from the agent.

    The response is identified by its position, because the agent may have reformatted it. If the agent has rewritten
    its context, return only the results of the calls in the response, or None.
    """
    size = len(given)
    continues = len(later) > size and later[size]["role"] == "assistant"
    if continues and same_conversation(given, later[:size]):
        return list(later[size + 1 :])
    call_ids = {call["id"] for call in answer.get("tool_calls") or ()}
    answers = [message for message in later if message["role"] == "tool" and message.get("tool_call_id") in call_ids]
    return answers or None


def results_of_calls(action: Action, made: Sequence[CallMade], is_over: bool) -> list[ChatMessage]:
    """Return the results of an action whose results are not contained in any later request from the agent.

    Each call in `made`, the calls that the agent made, is matched by name and order and gets a tool message. Each call
    that was not executed because the episode ended also gets a tool message. If the agent made a call that the action
    does not contain, the result of that call becomes a user message.
    """
    left, messages = list(made), []
    for call in get_tool_calls(action):
        match = next((one for one in left if one.name == call["name"]), None)
        if match is not None:
            left.remove(match)
        if match is not None or is_over:
            text = NOT_EXECUTED if match is None else match.answer
            messages.append({"role": "tool", "name": call["name"], "tool_call_id": call.get("id"), "content": text})
    return [*messages, *({"role": "user", "content": one.answer} for one in left)]


def _answer_key(message: ChatMessage) -> str:
    """Return a key that is equal for two assistant messages that look identical to a model."""
    return json.dumps(_normalized(message), sort_keys=True, default=str)


def _without_items(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages in recorded form. Only the model's messages keep the items of the model's API."""
    return [
        message
        if message["role"] == "assistant" or PROVIDER_ITEMS not in message
        else {key: value for key, value in message.items() if key != PROVIDER_ITEMS}
        for message in messages
    ]


def same_conversation(given: Sequence[ChatMessage], other: Sequence[ChatMessage]) -> bool:
    """Return True if both conversations look identical to a model.

    Additional keys, null values and surrounding whitespace are ignored.
    """
    if len(given) != len(other):
        return False
    return all(one == two or _normalized(one) == _normalized(two) for one, two in zip(given, other, strict=True))


def _normalized(message: ChatMessage) -> tuple[Any, ...]:
    content = message.get("content") or ""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text = function.get("arguments") or "{}"
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = text
        calls.append((call["id"], function["name"], arguments))
    return message["role"], content, message.get("tool_call_id"), calls

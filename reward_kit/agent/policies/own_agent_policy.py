"""`OwnAgentPolicy`, which runs an agent that has its own loop, in any framework, and records its model requests.

The agent of each episode receives a private OpenAI-compatible URL, behind which is the real model. It needs no code of
this package. It runs in a task next to the worker, and the two take turns: while `get_action` runs, only the agent may
use the environment of the episode. At all other times, only the worker may use it.

`RecordingEndpoint` is the OpenAI-compatible server on the loopback interface to which the agent sends its requests.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import inspect
import json
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import pydantic
from aiohttp import web

from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.agent.policy_interface import (
    Action,
    AgentPolicy,
    EpisodeContext,
    PolicyOutput,
    get_tool_calls,
    policy_output,
)
from reward_kit.agent.tool_execution import NOT_EXECUTED
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, EpisodeError, PolicyError, RewardKitError, boundary, type_name
from reward_kit.loading import load_object
from reward_kit.models import Message
from reward_kit.providers.completion import ChatCompletion
from reward_kit.safe_input import AGENT_REQUEST_BYTES, parse_json
from reward_kit.validation import describe_validation_error

ChatMessage = dict[str, Any]
"""A message in chat form, unmodified."""
_MESSAGES = pydantic.TypeAdapter(list[Message])
_NOT_PASSED_ON = frozenset({"model", "messages", "stream", "stream_options", "n", "seed", "logprobs", "top_logprobs"})
_NOT_SERVED = {
    **dict.fromkeys(
        ("logprobs", "top_logprobs"), "log-probabilities are recorded, but not returned to the agent; remove this key"
    ),
    **dict.fromkeys(("functions", "function_call"), "this key is not supported; use tools and tool_choice"),
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request of a client: the unmodified conversation, and the other keys except those that the server sets.

    If `include_usage` is true, a stream ends with a chunk that contains the usage.
    """

    messages: list[ChatMessage]
    options: dict[str, Any]
    stream: bool = False
    include_usage: bool = False


def _parse_request(data: bytes) -> ChatRequest:
    """Parse the body of a chat completion request. An invalid body raises an error with HTTP status 400."""
    try:
        body = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise web.HTTPBadRequest(text=f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text=f"the body must be a JSON object, got {type_name(body)}")
    if body.get("n") not in (None, 1):
        raise web.HTTPBadRequest(text=f"n must be 1, got {body['n']!r}; send one request per answer")
    for key, problem in _NOT_SERVED.items():
        if body.get(key):
            raise web.HTTPBadRequest(text=f"{key}: {problem}")
    messages, stream_options = body.get("messages"), body.get("stream_options")
    if not isinstance(messages, list) or not messages:
        raise web.HTTPBadRequest(text="messages must be a list of at least one message")
    try:
        _MESSAGES.validate_python(messages)
    except pydantic.ValidationError as error:
        raise web.HTTPBadRequest(text=f"messages: {describe_validation_error(error)[0]}") from error
    return ChatRequest(
        messages,
        {key: value for key, value in body.items() if key not in _NOT_PASSED_ON and value is not None},
        stream=bool(body.get("stream")),
        include_usage=isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage")),
    )


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """A completion that is returned to a client, with its id and the name of the model."""

    completion: ChatCompletion
    id: str
    model: str

    def to_json(self) -> dict[str, Any]:
        """Return the chat completion as a JSON object."""
        message = self.completion.message.to_chat()
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._finish_reason()}
        return {**self._head("chat.completion"), "choices": [choice], **self._usage()}

    def chunks(self, include_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the completion as chunks. If the usage is requested and known, the last chunk contains it."""
        message, head = self.completion.message, self._head("chat.completion.chunk")
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": None if message.tool_calls and not message.text else ""}
        ]
        if message.reasoning_content:
            deltas.append({"reasoning_content": message.reasoning_content})
        if message.text:
            deltas.append({"content": message.text})
        for index, call in enumerate(message.tool_calls or ()):
            name = {"name": call.function.name, "arguments": ""}
            deltas.append({"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": name}]})
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": call.function.arguments}}]})
        for delta in deltas:
            yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self._finish_reason()}]}
        if include_usage and self.completion.usage:
            yield {**head, "choices": [], **self._usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def _finish_reason(self) -> str:
        return self.completion.finish_reason or ("tool_calls" if self.completion.message.tool_calls else "stop")

    def _usage(self) -> dict[str, Any]:
        usage = self.completion.usage
        if not usage:
            return {}
        counts: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        if usage.cache_write_tokens is not None:
            counts["prompt_tokens_details"]["cache_write_tokens"] = usage.cache_write_tokens
        if usage.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        return {"usage": counts}


Answerer = Callable[[ChatRequest], Awaitable[RecordedAnswer]]
"""Answers one request from an episode's agent; raises an `EpisodeError` if the episode is over."""


class RecordingEndpoint:
    """The server for all episodes of a policy. The first `open` starts it.

    `model` is the name of the model in its answers.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._answerers: dict[str, Answerer] = {}
        self._runner: web.AppRunner | None = None
        self._starting = anyio.Lock()
        self._url = ""

    async def open(self, answerer: Answerer) -> str:
        """Return a new base URL, such as "http://127.0.0.1:41233/TOKEN/v1". `answerer` answers the requests to it."""
        async with self._starting:
            if self._runner is None:
                app = web.Application(client_max_size=AGENT_REQUEST_BYTES, middlewares=[_errors_as_json])
                app.router.add_post("/{token}/v1/chat/completions", self._complete)
                app.router.add_get("/{token}/v1/models", self._models)
                app.router.add_route("*", "/{token}/v1/{rest:.*}", self._unserved)
                # Cancel the requests of disconnected clients, to save calls to the model.
                self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
                await self._runner.setup()
                await web.TCPSite(self._runner, "127.0.0.1", 0).start()
                self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        token = secrets.token_urlsafe(18)
        self._answerers[token] = answerer
        return f"{self._url}/{token}/v1"

    def forget(self, base_url: str) -> None:
        """Remove a base URL. Later requests to it receive status 404."""
        self._answerers.pop(base_url.split("/")[-2], None)

    async def close(self) -> None:
        """Stop the server. Call this once, when no base URL is in use."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _answerer(self, request: web.Request) -> Answerer:
        answerer = self._answerers.get(request.match_info["token"])
        if answerer is None:
            raise web.HTTPNotFound(text="no running episode uses this URL")
        return answerer

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        answerer = self._answerer(request)
        parsed = _parse_request(await request.read())
        try:
            answer = await answerer(parsed)
        except EpisodeError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        if not parsed.stream:
            return web.json_response(answer.to_json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in answer.chunks(parsed.include_usage)]
        await response.write("".join([*events, "data: [DONE]\n\n"]).encode())
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._answerer(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "reward-kit"}
        return web.json_response({"object": "list", "data": [model]})

    async def _unserved(self, request: web.Request) -> web.Response:
        self._answerer(request)
        raise web.HTTPNotFound(text=f"{request.match_info['rest']} is not supported; use POST chat/completions")


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Return errors in the JSON format of the OpenAI API."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        body = {"error": {"message": error.text, "type": "invalid_request_error", "param": None, "code": None}}
        return web.json_response(body, status=error.status)


logger = logging.getLogger("reward_kit.agent")
_AGENT_CODE = "the agent's own code"
_OVER = "the episode is over: its task ended, or a limit was reached"
_SPARE_SECONDS = 0.1
_END_SECONDS = 10.0


@dataclass(slots=True)
class AgentTask:
    """The task that an agent receives for one episode.

    Attributes:
        messages: the conversation so far in the chat format, usually a system message and a user message.
        tools: the specifications in OpenAI format of the tools that could be called through `call_tool` at the latest
            model request. The list may be empty.
        call_tool: a function that calls a tool of the environment: `await call_tool(name, arguments)` returns the
            result as text. Omit `await` in an agent that is a plain function. The arguments are a mapping, or the JSON
            text that the model wrote. It raises an EpisodeError once the episode is over.
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


Agent = Callable[[AgentTask, str], Any]
"""`async def agent(task, base_url)`, or a plain function, which runs in a separate thread.

It returns the final answer as text, or None if the final answer is the model's last answer.
"""


class OwnAgentPolicy(AgentPolicy):
    """A policy that runs an agent and records every answer of the model that the agent receives as one action.

    An action is complete when the agent sends its next request or ends. The work of the agent in between, including its
    tool calls, is recorded in the `results` of the action. The time limits of a policy therefore include this work. The
    agent is stopped when its episode ends.

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
                f"agent: {function!r} cannot be called with the task and the base URL: {error}"
            ) from error
        except ValueError:
            logger.debug("cannot read the signature of %r", function)
        self._agent: Agent = function
        self._model = model
        self._upstream = OpenAIAgentPolicy(model, **options)
        self._endpoint = RecordingEndpoint(model)

    def __repr__(self) -> str:
        return f"OwnAgentPolicy({getattr(self._agent, '__name__', self._agent)!r}, {self._upstream!r})"

    @property
    def knows_cost(self) -> bool:
        """True if the usage of an answer from the real endpoint includes its cost."""
        return self._upstream.knows_cost

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Open the session of one episode, with a separate base URL. The first `get_action` starts the agent."""
        session = _AgentSession(self._agent, self._model, self._upstream, self._endpoint, context)
        session.base_url = await self._endpoint.open(session.answer)
        return session

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Raise a PolicyError, because an agent acts only in an episode. Use the session that `open` returns."""
        raise PolicyError("own_agent acts only within an episode; open a session first")

    async def close(self) -> None:
        """Stop the recording endpoint and close the connections to the real one."""
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
    """A tool call that the agent made in the environment of its episode, and the result."""

    name: str
    answer: str


class _AgentSession(AgentPolicy):
    """One run of an agent. Its requests arrive through `endpoint`, and the model `upstream` answers them."""

    def __init__(
        self,
        agent: Agent,
        model: str,
        upstream: OpenAIAgentPolicy,
        endpoint: RecordingEndpoint,
        context: EpisodeContext,
    ) -> None:
        self._agent, self._model, self._upstream = agent, model, upstream
        self._endpoint, self._context = endpoint, context
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

    async def answer(self, request: ChatRequest) -> RecordedAnswer:
        """Wait until the agent may continue, and return the answer of the model to its request."""
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
        """Answer the next request of the agent, and record how the agent uses the answer.

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

    async def close(self) -> None:
        """Stop the agent, and reject further requests and calls. A thread that hangs is abandoned."""
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
        """Call a tool of the environment, while the agent may use it."""
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
        # Use a new seed for each turn, so that an agent that repeats a request can get a different answer.
        seed = self._context.seed + self._answers
        self._answers += 1
        completion = await self._upstream.complete(
            {**request.options, "messages": given}, seed, self._context.rollout_id
        )
        output = policy_output(completion)
        action = output.action_structured
        if not same_conversation(self._conversation, given):
            action["prompt_messages"] = given
        self._made = []
        if not waiting.done():
            name = f"chatcmpl-{self._context.rollout_id}-{self._answers}"
            waiting.set_result(RecordedAnswer(completion, name, self._model))
        # Stop shortly before the worker's deadline, so that the answer is recorded even if the agent works too long.
        with anyio.CancelScope(deadline=anyio.current_effective_deadline() - _SPARE_SECONDS):
            await self._wait_for_agent()
        answer = completion.message.to_chat()
        results = None
        if self._requests and not self._is_over:
            results = read_results(given, answer, next(iter(self._requests.values())).messages)
        if results is None:
            results = results_of_calls(action, self._made, self._is_over)
        action["results"] = results
        self._conversation = [*given, answer, *results]
        self._made = []
        ended = self._running
        if ended is not None and ended.done() and not ended.cancelled() and ended.exception() is None:
            text = ended.result()  # the agent's final answer, which may repeat the model's last one
            if text is None or text.strip() == completion.message.text.strip():
                action["is_final"] = True
        return output

    async def _wait_for_agent(self) -> None:
        """Wait until the agent sends a request or ends, or until the episode is over."""
        while not (self._requests or self._is_over or self._has_ended()):
            self._moved.clear()
            await self._moved.wait()

    def _closing_action(self) -> PolicyOutput:
        """Return the last action of an agent whose final answer is not an answer of the model."""
        text = None
        if self._has_ended():
            assert self._running is not None
            with boundary(PolicyError, _AGENT_CODE):
                text = self._running.result()
        action: Action = {"type": "terminate", **({"content": text} if text else {})}
        if self._made:  # the agent never asked the model, so its calls come before its only action
            called = results_of_calls(action, self._made, self._is_over)
            action |= {"prompt_messages": [*self._conversation, *called], "results": []}
        # The action was free; report a cost of 0 if costs are known.
        facts = {"usage": {"cost": 0.0}} if self._upstream.knows_cost else None
        return PolicyOutput(action, text, facts)

    def _has_ended(self) -> bool:
        return self._running is not None and self._running.done()


async def _run_in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a plain function in a separate thread, which continues if the task that awaits it is cancelled.

    In a thread pool, episodes would be delayed while all threads wait for a model, and one hanging thread would keep
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
    """Return the messages that follow the answer to `given` in a later request from the agent.

    The answer is found by its position, because the agent may have reformatted it. If the agent has rewritten its
    context, return only the results of the calls in the answer, or None if none exist.
    """
    size = len(given)
    continues = len(later) > size and later[size]["role"] == "assistant"
    if continues and same_conversation(given, later[:size]):
        return list(later[size + 1 :])
    call_ids = {call["id"] for call in answer.get("tool_calls") or ()}
    answers = [message for message in later if message["role"] == "tool" and message.get("tool_call_id") in call_ids]
    return answers or None


def results_of_calls(action: Action, made: Sequence[CallMade], is_over: bool) -> list[ChatMessage]:
    """Return the results of an action that no later request of the agent contains.

    Each call that the agent `made` is matched by its name and order and gets a tool message. So does each call that the
    end of the episode prevented. If the agent made a call that the action does not contain, its result becomes a user
    message.
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


def same_conversation(given: Sequence[ChatMessage], other: Sequence[ChatMessage]) -> bool:
    """Return True if both conversations look the same to a model.

    Additional keys, null values and surrounding spaces make no difference.
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

"""What an agent with a loop of its own did after a model's answer: read from its next request, or from its calls."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy, output_of
from reward_kit.agent.policies.recording_endpoint import Answer, ChatMessage, ChatRequest, RecordingEndpoint
from reward_kit.agent.policy_interface import Action, AgentPolicy, EpisodeContext, PolicyOutput, tool_calls_of
from reward_kit.agent.tool_execution import NOT_CARRIED_OUT
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, EpisodeError, PolicyError, RewardKitError, boundary, kind_of
from reward_kit.loading import load_object
from reward_kit.models import Message
from reward_kit.providers.completion import ChatCompletion
from reward_kit.strict_json import read_strictly


@dataclass(slots=True)
class CallMade:
    """A call that the agent had carried out in the episode's world, and the text that answered it."""

    name: str
    answer: str


def same_conversation(given: Sequence[ChatMessage], other: Sequence[ChatMessage]) -> bool:
    """Both say the same to a model, whatever keys, nulls and spaces around an answer frameworks add or drop."""
    return len(given) == len(other) and all(map(_same_message, given, other))


def read_results(
    given: Sequence[ChatMessage], answer: ChatMessage, later: Sequence[ChatMessage]
) -> list[ChatMessage] | None:
    """The messages that followed the answer to `given` in a later request of the agent.

    Args:
        given: the earlier request's messages.
        answer: what the model said to them. It may come back in another shape; its place tells it.
        later: the later request's messages.

    Returns:
        The messages after the answer. Where the agent rewrote its context, those of them that name one of the answer's
        calls; None where there are none either.
    """
    size = len(given)
    goes_on = len(later) > size and later[size]["role"] == "assistant"
    if goes_on and same_conversation(given, later[:size]):
        return list(later[size + 1 :])
    call_ids = {call["id"] for call in answer.get("tool_calls") or ()}
    answers = [message for message in later if message["role"] == "tool" and message.get("tool_call_id") in call_ids]
    return answers or None


def results_of_calls(action: Action, made: Sequence[CallMade], is_over: bool) -> list[ChatMessage]:
    """What came of an action, where no later request of the agent tells it.

    Args:
        action: what the model said.
        made: the calls that the agent had carried out after it, in order.
        is_over: the world ended the episode in one of them.

    Returns:
        A tool message for each of the action's calls that was carried out, matched by name and order; a user message
        with the answer of each other call, which the agent made of its own accord.
    """
    left, messages = list(made), []
    for call in tool_calls_of(action):
        found = next((one for one in left if one.name == call["name"]), None)
        if found is not None:
            left.remove(found)
        if found is not None or is_over:
            text = NOT_CARRIED_OUT if found is None else found.answer
            answer = {"role": "tool", "name": call["name"], "tool_call_id": call.get("id"), "content": text}
            messages.append(answer)
    return [*messages, *({"role": "user", "content": one.answer} for one in left)]


def _same_message(given: ChatMessage, other: ChatMessage) -> bool:
    return given == other or _meaning(given) == _meaning(other)


def _meaning(message: ChatMessage) -> tuple[Any, ...]:
    calls = [_call_meaning(call) for call in message.get("tool_calls") or ()]
    content = _content_meaning(message.get("content"))
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    return message["role"], content, message.get("tool_call_id"), calls


def _content_meaning(content: Any) -> Any:
    """Content parts that are all text count as the text they hold, no content as none."""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _call_meaning(call: Mapping[str, Any]) -> tuple[Any, ...]:
    function = call["function"]
    text = function.get("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = text
    return call["id"], function["name"], arguments


logger = logging.getLogger("reward_kit.agent")


async def in_thread(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result. A thread cannot be ended: where this is cancelled, it goes on and nobody listens.

    Args:
        what: whose function it is, for the message.
        function: called with the arguments.
        arguments: as given.

    Raises:
        PolicyError: the function raised.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            with boundary(PolicyError, what):
                result = function(*arguments)
        except (RewardKitError, asyncio.CancelledError) as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError as error:
            logger.debug("a thread ended after its event loop: %s", error)

    threading.Thread(target=work, name=f"reward-kit {function!r}", daemon=True).start()
    return await done


def from_thread(function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """A coroutine function of the running loop as a plain function for another thread, which waits for its result."""
    loop = asyncio.get_running_loop()

    def call(*arguments: Any, **named: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(function(*arguments, **named), loop).result()

    return call


_WHOSE = "the agent's own code"

_OVER = "the episode is over: its task ended, or a limit was reached"

_SPARE_SECONDS = 0.1

_END_SECONDS = 10.0


@dataclass(slots=True)
class AgentTask:
    """What an agent is told of its episode.

    Attributes:
        messages: the conversation so far in chat form; usually a system and a user message.
        tools: the specifications in OpenAI form of what `call_tool` carries out, as they were when the model was last
            asked; [] where there are none.
        call_tool: `await call_tool(name, arguments)` carries out a tool of the episode's world and gives the text that
            answers it; without `await` for an agent that is a plain function. `arguments` is a mapping, or the JSON
            text as the model wrote it. Raises an EpisodeError once the episode is over.
        model: the model's name; requests may give any.
        sample_id: what the episode is about.
        rollout_id: the episode's own id.
        seed: for everything random in the agent; never shared between episodes.
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
        """The text of the last user message, "" where there is none."""
        asked = [message for message in self.messages if message["role"] == "user"]
        return Message.model_validate(asked[-1]).text if asked else ""


Agent = Callable[[AgentTask, str], Any]

"""`async def agent(task, base_url)`, or a plain function, which runs in a thread of its own. It returns its final
answer as text, or None where the model's last answer is that."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request of the agent, and where its answer goes."""

    request: ChatRequest
    answer: asyncio.Future[Answer]


@dataclass(slots=True)
class _Turn:
    """An answer of the model: to which messages, and which calls the agent made after it."""

    given: Sequence[ChatMessage] = ()
    made: list[CallMade] = field(default_factory=list)


class AgentSession(AgentPolicy):
    """One run of an agent.

    Args:
        agent: the agent.
        model: the name under which the real model is known.
        upstream: asks the real model.
        context: the episode.
    """

    def __init__(self, agent: Agent, model: str, upstream: OpenAIAgentPolicy, context: EpisodeContext) -> None:
        self._agent, self._model, self._upstream, self._context = agent, model, upstream, context
        self._endpoint: RecordingEndpoint | None = None
        self._base_url = ""
        self._tools: list[ToolSpec] = []
        self._running: asyncio.Task[str | None] | None = None
        self._requests: deque[_Waiting] = deque()
        self._unanswered: set[_Waiting] = set()
        self._moved = asyncio.Event()
        self._world = asyncio.Lock()
        self._is_workers = False  # the worker has the world
        self._calling: asyncio.Task[Any] | None = None
        self._is_over = False
        self._turn = _Turn()
        self._answers = 0
        self._conversation: list[ChatMessage] = []  # as the record has it

    async def listen(self, endpoint: RecordingEndpoint) -> None:
        """Take requests at an address of `endpoint`."""
        self._endpoint, self._base_url = endpoint, await endpoint.open(self.answer)

    async def answer(self, request: ChatRequest) -> Answer:
        """The model's answer to a request of the agent, once its turn has come.

        Raises:
            EpisodeError: the episode is over.
        """
        if self._is_over:
            raise EpisodeError(_OVER)
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._requests.append(waiting)
        self._unanswered.add(waiting)
        self._moved.set()
        try:
            return await waiting.answer
        finally:
            self._unanswered.discard(waiting)
            if waiting in self._requests:  # the agent hung up before its turn came
                self._requests.remove(waiting)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Have the agent's next request answered, and see what it does with the answer.

        Raises:
            ProviderError: the real endpoint refused, or failed to the end of the retries.
            PolicyError: the agent raised, or returned neither text nor None.
        """
        self._tools[:] = available_tools_specs or []
        if self._running is None:
            self._start(observation)
        else:
            self._world.release()
        self._is_workers = False
        try:
            return await self._next_action()
        finally:
            await self._world.acquire()
            self._is_workers = True

    async def close(self) -> None:
        """Refuse further requests and calls, and end the agent; a thread that does not end is left behind."""
        self._is_over = True
        if self._endpoint is not None:
            self._endpoint.forget(self._base_url)
        for waiting in self._unanswered:
            if not waiting.answer.done():
                waiting.answer.set_exception(EpisodeError(_OVER))
        if self._running is None:
            return
        if self._is_workers:
            self._world.release()
        tasks = {self._running, *({self._calling} if self._calling is not None else ())}
        for task in tasks:
            task.cancel()
        _, left = await asyncio.wait(tasks, timeout=_END_SECONDS)
        if left:
            logger.warning("the agent of %s goes on after the end of its episode", self._context.rollout_id)
        elif not self._running.cancelled() and (error := self._running.exception()) is not None:
            logger.debug("the agent of %s ended with its episode", self._context.rollout_id, exc_info=error)

    def _start(self, observation: Sequence[Message]) -> None:
        self._conversation = [message.to_chat() for message in observation]
        context, messages = self._context, [message.to_chat() for message in observation]
        is_async = inspect.iscoroutinefunction(self._agent) or inspect.iscoroutinefunction(type(self._agent).__call__)
        call_tool = self._call_tool if is_async else from_thread(self._call_tool)
        task = AgentTask(
            messages, self._tools, call_tool, self._model, context.sample_id, context.rollout_id, context.seed
        )
        self._running = asyncio.create_task(self._run(task, is_async), name=f"agent of {context.rollout_id}")
        self._running.add_done_callback(lambda _: self._moved.set())

    async def _run(self, task: AgentTask, is_async: bool) -> str | None:
        """The agent, from its beginning to its end."""
        with boundary(PolicyError, _WHOSE):
            given = (task, self._base_url)
            result = await (self._agent(*given) if is_async else in_thread(_WHOSE, self._agent, *given))
        if not isinstance(result, str | None):
            raise PolicyError(f"the agent returned {kind_of(result)}; it returns text, or None")
        return result

    async def _call_tool(self, name: str, arguments: Mapping[str, Any] | str | None = None) -> str:
        """Carry out a tool of the episode's world, when it is the agent's turn."""
        async with self._world:
            if self._is_over or self._context.call_tool is None:
                raise EpisodeError(_OVER)
            self._calling = asyncio.current_task()
            try:
                answer = await self._context.call_tool(name, _read_arguments(arguments))
            finally:
                self._calling = None
            self._turn.made.append(CallMade(name, answer.text))
            if answer.is_over:
                self._is_over = True
                self._moved.set()
            return answer.text

    async def _next_action(self) -> PolicyOutput:
        await self._until_it_moves()
        if self._is_over or self._has_ended:
            return self._closing_action()
        waiting = self._requests.popleft()
        completion = await self._ask_model(waiting.request)
        output = output_of(completion)
        given = waiting.request.messages
        if not same_conversation(self._conversation, given):
            output.action_structured["prompt_messages"] = given
        self._turn = _Turn(given)
        if not waiting.answer.done():
            name = f"chatcmpl-{self._context.rollout_id}-{self._answers}"
            waiting.answer.set_result(Answer(completion, name, self._model))
        # Given up a little before the worker's patience ends, so that an answer is recorded however long the agent
        # works on it.
        with anyio.CancelScope(deadline=anyio.current_effective_deadline() - _SPARE_SECONDS):
            await self._until_it_moves()
        self._conclude(output.action_structured, completion.message)
        return output

    async def _ask_model(self, request: ChatRequest) -> ChatCompletion:
        # A seed for each turn, so that an agent that asks the same thing again can hear something else.
        seed = self._context.seed + self._answers
        self._answers += 1
        body = {**request.options, "messages": request.messages}
        return await self._upstream.complete(body, seed, self._context.rollout_id)

    async def _until_it_moves(self) -> None:
        """Wait until the agent asks again or ends, or the world is over."""
        while not (self._requests or self._is_over or self._has_ended):
            self._moved.clear()
            await self._moved.wait()

    def _conclude(self, action: Action, said: Message) -> None:
        """Add what followed the model's answer, and whether the agent is done."""
        turn, answer = self._turn, said.to_chat()
        results = None
        if self._requests and not self._is_over:
            results = read_results(turn.given, answer, self._requests[0].request.messages)
        if results is None:
            results = results_of_calls(action, turn.made, self._is_over)
        action["results"] = results
        self._conversation = [*turn.given, answer, *results]
        self._turn = _Turn()
        if self._has_ended and self._is_last_word(said.text):
            action["is_final"] = True

    def _closing_action(self) -> PolicyOutput:
        """The end of an agent that did not end with an answer of the model."""
        text = None
        if self._has_ended:
            assert self._running is not None
            with boundary(PolicyError, _WHOSE):
                text = self._running.result()
        action: Action = {"type": "terminate", **({"content": text} if text else {})}
        if self._turn.made:
            action["results"] = results_of_calls(action, self._turn.made, self._is_over)
        # It cost nothing, and where costs are known it has to say so.
        facts = {"usage": {"cost": 0.0}} if self._upstream.knows_cost else None
        return PolicyOutput(action, text, facts)

    @property
    def _has_ended(self) -> bool:
        return self._running is not None and self._running.done()

    def _is_last_word(self, said: str) -> bool:
        """The agent ended well, and has nothing to add to the model's last answer."""
        ended = self._running
        if ended is None or ended.cancelled() or ended.exception() is not None:
            return False
        text = ended.result()
        return text is None or text.strip() == said.strip()


def _read_arguments(arguments: Mapping[str, Any] | str | None) -> Mapping[str, Any] | str:
    """Arguments that are JSON text as the mapping they hold; other text as it is, for the tool to refuse."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        read = read_strictly(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


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

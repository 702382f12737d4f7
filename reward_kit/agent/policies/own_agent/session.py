"""One episode of an agent with a loop of its own: its requests become actions, one after another.

The agent runs in a task beside the worker. The two take turns: while `get_action` runs, the episode's world belongs to
the agent, otherwise to the worker.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from reward_kit.agent.policies.chat_outputs import output_of
from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.agent.policies.own_agent.chat_wire import Answer, ChatMessage, ChatRequest
from reward_kit.agent.policies.own_agent.recording_endpoint import RecordingEndpoint
from reward_kit.agent.policies.own_agent.threads import from_thread, in_thread
from reward_kit.agent.policies.own_agent.what_followed import (
    CallMade,
    read_results,
    results_of_calls,
    same_conversation,
)
from reward_kit.agent.policy_interface import Action, AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import EpisodeError, PolicyError, boundary, kind_of
from reward_kit.models import Message
from reward_kit.providers.completion import ChatCompletion
from reward_kit.safe_input import read_strictly

logger = logging.getLogger("reward_kit.agent")

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

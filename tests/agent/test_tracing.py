"""Test traces in an application that has a tracer provider, and the W3C context in requests."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from reward_kit import AsyncRewardAgent, RLRolloutWorker, TaskDefinitionModel, ToolRegistry, reward_function
from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.environments.http import JsonClient, ServerAddress
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.reward_agent.loading import make_scorer
from reward_kit.reward_agent.remote import RemoteReward
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.telemetry.current import trace_headers
from reward_kit.telemetry.traces import Telemetry, derived_ids, tracing
from reward_kit.typed_interface import reward_spec
from tests.environments.mcp_resources import opened
from tests.integrations.reward_server.running_server import KEY, server

MCP_SERVER = """
from mcp.server.mcpserver import MCPServer
from opentelemetry import trace

server = MCPServer("traced")

@server.tool()
def trace_id() -> str:
    "The id of the current trace."
    return f"{trace.get_current_span().get_span_context().trace_id:032x}"

server.run()
"""
TEXT = {"type": "text", "content": "hello"}


class Application:
    """A tracer provider, and its finished spans by name."""

    def __init__(self, ids: Any = None) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(id_generator=ids)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("application")

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span


@pytest.fixture
def application() -> Application:
    return Application()


def worker(*actions: dict[str, Any], **rest: Any) -> RLRolloutWorker:
    task = TaskDefinitionModel(name="greeting", messages=[{"role": "user", "content": "Say hello."}], on_text="end")
    return RLRolloutWorker(task, ScriptedPolicy(list(actions)), **rest)


async def test_spans_are_below_the_current_span(application: Application) -> None:
    tools = ToolRegistry("tools")

    @tools.tool
    def look() -> str:
        "Look."
        with application.tracer.start_as_current_span("inside the tool"):
            return "nothing"

    call = {"type": "tool_call", "name": "look", "arguments": {}}
    with application.tracer.start_as_current_span("request") as request, tracing(application.provider):
        await worker(call, TEXT, tools=tools).run_group(3)
        assert trace.get_current_span() is request
    roots = application.spans("invoke_agent ScriptedPolicy")
    assert len(roots) == len({root.context.span_id for root in roots}) == 3
    assert {root.parent.span_id for root in roots} == {request.get_span_context().span_id}
    calls = {span.context.span_id for span in application.spans("execute_tool look")}
    assert {span.parent.span_id for span in application.spans("inside the tool")} == calls
    assert {span.context.trace_id for span in application.spans("step 1")} == {request.get_span_context().trace_id}


async def test_episode_that_fails_has_error_spans(application: Application) -> None:
    class Broken(ScriptedPolicy):
        async def get_action(self, *arguments: Any) -> Any:
            raise OSError("broken")

        async def open(self, context: Any) -> Any:
            return self

    task = TaskDefinitionModel(name="greeting", messages=[{"role": "user", "content": "Say hello."}])
    with tracing(application.provider):
        await RLRolloutWorker(task, Broken([])).collect_episode()
    for name in ("invoke_agent Broken", "step 0"):
        span = application.span(name)
        assert not span.status.is_ok and "broken" in (span.status.description or "")


async def test_nothing_is_traced_outside_of_the_block(application: Application) -> None:
    with tracing(application.provider):
        pass
    episode = await worker(TEXT).collect_episode()
    assert isinstance(episode, SingleAgentEpisode) and "traceparent" not in episode.custom_data["timing"]
    assert not application.spans("step 0") and trace_headers() == {}


async def test_resource_requests_have_the_context(application: Application) -> None:
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("traceparent"))
        return web.json_response({})

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = JsonClient(ServerAddress(f"http://127.0.0.1:{runner.addresses[0][1]}", {}), 5.0)
    try:
        with application.tracer.start_as_current_span("call") as span:
            await client.get("/off")
            with tracing(application.provider):
                await client.get("/on")
    finally:
        await client.close()
        await runner.cleanup()
    context = span.get_span_context()
    off, on = seen
    assert off is None and (on or "").startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")


async def test_reward_server_continues_the_trace(application: Application) -> None:
    @reward_function
    def polite(messages: list[Any]) -> dict[str, Any]:
        return {"score": 1.0}

    with tracing(application.provider):
        episode = await worker(TEXT).collect_episode()
        async with server(polite) as running:
            reward = await RemoteReward.connect(f"http://127.0.0.1:{running.port}/v1/rewards/polite", api_key=KEY)
            async with AsyncRewardAgent(make_scorer(reward)) as agent:
                await agent.score_all([ScoringRequest.from_episode(episode)])
    inner, outer = application.spans("reward polite")
    assert inner.parent.span_id == outer.context.span_id and inner.context.trace_id == outer.context.trace_id
    assert outer.parent.span_id == application.span("invoke_agent ScriptedPolicy").context.span_id


async def test_mcp_requests_have_the_context(application: Application, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(MCP_SERVER)
    async with opened(["{python}", str(tmp_path / "server.py")]) as resource:
        call = {"type": "tool_call", "name": "trace_id", "arguments": {}}
        with tracing(application.provider):
            _, messages, _ = await worker(call, TEXT, environment=resource).run_episode()
    trace_id = application.span("execute_tool trace_id").context.trace_id
    assert next(message.text for message in messages if message.role == "tool") == f"{trace_id:032x}"


async def test_group_reward_has_a_span_per_episode(application: Application) -> None:
    @reward_function(mode="batch")
    def ranked(rollouts_messages: list[list[Any]]) -> list[dict[str, Any]]:
        return [{"score": float(index)} for index in range(len(rollouts_messages))]

    with tracing(application.provider):
        group = await worker(TEXT).run_group(2)
        async with AsyncRewardAgent(make_scorer(reward_spec(ranked))) as agent:
            await agent.score_all([ScoringRequest.from_episode(one) for one in group.episodes], group_size=2)
    scores = [span.attributes["gen_ai.evaluation.score.value"] for span in application.spans("reward ranked")]
    assert sorted(scores) == [0.0, 1.0]
    roots = {span.context.span_id for span in application.spans("invoke_agent ScriptedPolicy")}
    assert {span.parent.span_id for span in application.spans("reward ranked")} == roots


def record(**changes: Any) -> dict[str, Any]:
    """Return a record of two steps, as a policy with its own client writes it."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]},
        {"role": "assistant", "content": "A cat.", "reasoning_content": "It has whiskers."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    steps = [{"assistant_turn": 1, "reward": None}, {"assistant_turn": 3, "reward": 1.0, "info": {"usage": usage}}]
    timing = {"started_at": "2026-01-02T03:04:05.000006+00:00", "duration_s": 4.0, "steps_policy_s": [1.5, 2.0]}
    ending = {"final": {"info": {"finish_reason": "stop"}}, "timing": timing, **changes}
    return {"rollout_id": "r", "policy": "mine", "messages": messages, "steps": steps, **ending}


def test_record_of_an_earlier_release_has_estimated_times(application: Application) -> None:
    Telemetry(application.provider).finish_episode(record())
    root, steps = application.span("invoke_agent mine"), [application.span("step 0"), application.span("step 1")]
    assert root.attributes["reward_kit.time.estimated"] is True
    assert root.end_time - root.start_time == 4_000_000_000 and root.start_time % 1_000_000_000 == 6_000
    assert [step.end_time - step.start_time for step in steps] == [1_500_000_000, 2_000_000_000]
    chat = application.span("chat")
    assert chat.parent.span_id == steps[0].context.span_id and chat.attributes["gen_ai.usage.input_tokens"] == 5
    assert chat.attributes["gen_ai.provider.name"] == "_OTHER" and "gen_ai.request.model" not in chat.attributes


def test_messages_have_the_form_of_the_conventions(application: Application, monkeypatch: Any) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    Telemetry(application.provider, redact=lambda text: text.replace("whiskers", "(hidden)")).finish_episode(record())
    attributes = application.span("chat").attributes
    assert json.loads(attributes["gen_ai.input.messages"]) == [
        {
            "role": "user",
            "parts": [
                {"type": "text", "content": "What is it?"},
                {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "QUJD"},
            ],
        }
    ]
    parts = [{"type": "reasoning", "content": "It has (hidden)."}, {"type": "text", "content": "A cat."}]
    expected = [{"role": "assistant", "parts": parts, "finish_reason": "unknown"}]
    assert json.loads(attributes["gen_ai.output.messages"]) == expected


@pytest.mark.parametrize(("text", "value"), [('{"city": "Bern"}', {"city": "Bern"}), ("{city", "{city")])
def test_tool_calls_of_messages_have_the_form_of_the_conventions(
    application: Application, monkeypatch: Any, text: str, value: Any
) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": text}}
    messages = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    info = {"usage": {"prompt_tokens": 1, "completion_tokens": 1}, "finish_reason": "tool_calls"}
    steps = [{"assistant_turn": 1, "reward": None}]
    Telemetry(application.provider).finish_episode(record(messages=messages, steps=steps, final={"info": info}))
    attributes = application.span("chat").attributes
    part = {"type": "tool_call", "id": "c", "name": "look", "arguments": value}
    expected = [{"role": "assistant", "parts": [part], "finish_reason": "tool_call"}]
    assert json.loads(attributes["gen_ai.output.messages"]) == expected
    assert attributes["gen_ai.response.finish_reasons"] == ("tool_calls",)  # as the model returned it


def test_transcript_without_times_is_traced() -> None:
    application = Application(derived_ids())
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    telemetry = Telemetry(application.provider)
    telemetry.finish_episode(record(timing=None), start)
    telemetry.finish_reward({"rollout_id": "r", "scorer": {"id": "exact"}, "score": 1.0}, start, {})
    root, reward = application.span("invoke_agent mine"), application.span("reward exact")
    assert root.attributes["reward_kit.time.estimated"] is True
    assert reward.parent.span_id == root.context.span_id and reward.context.trace_id == root.context.trace_id

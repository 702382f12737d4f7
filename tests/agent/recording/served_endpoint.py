"""An endpoint with one base URL that returns a fixed completion."""

from __future__ import annotations

import json
from typing import Any, get_args

import aiohttp
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from reward_kit.agent.recording import ChatRequest, RecordedAnswer, RecordingEndpoint, ServedModel
from reward_kit.models import FunctionCall, Message, ToolCall
from reward_kit.providers.completion import ChatCompletion, Usage

CALL = ToolCall(id="call_1", function=FunctionCall(name="add", arguments='{"x": 1}'))
SAID = ChatCompletion(
    Message(role="assistant", content="Let me \U0001f914 see.", tool_calls=[CALL], reasoning_content="hm"),
    finish_reason="tool_calls",
    usage=Usage(11, 7, cached_tokens=5, cache_write_tokens=2, reasoning_tokens=3),
)
HELLO = [{"role": "user", "content": "Hello"}]


class ServedEndpoint:
    """An endpoint with one address, its requests, and its completion."""

    def __init__(self, says: ChatCompletion = SAID, api: str = "chat", *, has_logprobs: bool = False) -> None:
        self.says, self.asked = says, list[ChatRequest]()
        self.endpoint = RecordingEndpoint(ServedModel("real-model", api, has_logprobs))

    async def answer(self, request: ChatRequest) -> RecordedAnswer:
        self.asked.append(request)
        return RecordedAnswer(self.says, str(len(self.asked) + 6), "real-model")

    async def __aenter__(self) -> ServedEndpoint:
        self.url = await self.endpoint.open(self.answer)
        self.http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        await self.endpoint.close()

    async def post(
        self, body: Any, url: str | None = None, path: str = "chat/completions"
    ) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(f"{url or self.url}/{path}", data=data) as response:
            return response.status, await response.json()

    async def stream(self, body: Any, path: str) -> list[dict[str, Any]]:
        """Return the events of a streamed answer, whose names are their types."""
        async with self.http.post(f"{self.url}/{path}", json={**body, "stream": True}) as response:
            assert response.content_type == "text/event-stream"
            lines = [event.split("\n") for event in (await response.text()).split("\n\n") if event]
        events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
        assert [name for name, _ in lines] == [f"event: {event['type']}" for event in events]
        return events

    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.url, api_key="any", max_retries=0)

    def anthropic(self) -> AsyncAnthropic:
        return AsyncAnthropic(base_url=self.url.removesuffix("/v1"), api_key="any", max_retries=0)


def check_events(events: list[dict[str, Any]], union: Any) -> None:
    """Validate events with their types in a union of an SDK, which is faster than with the whole union."""
    kinds = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(union)[0])}
    for event in events:
        kinds[event["type"]].model_validate(event, strict=False)

"""Test that a malformed value anywhere in a request is ignored or rejected, and never fails the server."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.agent.recording.served_endpoint import CALL, HELLO, ServedEndpoint
from tests.agent.recording.test_messages_api import BODY, CONVERSATION, TOOL
from tests.agent.recording.test_responses_api import TOOL as FUNCTION
from tests.agent.recording.test_responses_api import function_call, output

ASKED = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL.to_chat()]}],
        "stream_options": {"include_usage": True},
        "logprobs": False,
    },
    "responses": {
        "instructions": "Be brief.",
        "input": [ASKED, REASONING, {"role": "assistant", "content": "Yes"}, function_call(CALL), output(CALL)],
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "add"},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "sum", "schema": {}}},
        "include": [],
        "previous_response_id": None,
    },
    "messages": {
        **BODY,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": CONVERSATION,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "add"},
        "thinking": {"type": "enabled"},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
        "thread": {"type": "create"},
    },
}
DROPPED = object()


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        yield from paths(inner, (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    target: Any = body
    for key in path[:-1]:
        target = target[key]
    if value is DROPPED:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_malformed_value_never_fails_the_server(path: str, stream: bool) -> None:
    statuses: set[int] = set()
    async with ServedEndpoint(api=path.partition("/")[0]) as served:
        for key in paths(BODIES[path]):
            for value in (DROPPED, 3, [3], {"type": 3}):
                body = {**changed(BODIES[path], key, value), "stream": stream}
                async with served.http.post(f"{served.url}/{path}", json=body) as response:
                    statuses.add(response.status)
                    assert response.status in (200, 400), (key, value, await response.text())
    assert statuses == {200, 400}

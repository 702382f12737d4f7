"""Answers without an end are cut at a documented size with one error and little memory."""

from __future__ import annotations

import pytest

from tests.endless_server import Peak, endless, peak

PREPARE = """
import aiohttp
from reward_kit.providers.chat import DIALECTS, ChatEndpoint
from reward_kit.providers.request_queue import RetryPolicy
"""
CALL = """
endpoint = ChatEndpoint(
    "http://127.0.0.1:{port}/v1", "key", retry=RetryPolicy(base_s=0.01), total_timeout_s=60, dialect=DIALECTS["{api}"]
)
try:
    await endpoint.complete({{"model": "m", "messages": [{{"role": "user", "content": "x"}}], "stream": {stream}}})
finally:
    await endpoint.aclose()
"""
TOO_LARGE = "; the rest was not read"


def call(kind: str, stream: bool, prepare: str = "", api: str = "chat") -> Peak:
    with endless(kind) as port:
        return peak(PREPARE + prepare, CALL.format(port=port, stream=stream, api=api))


@pytest.mark.parametrize(
    ("api", "kind"),
    [("chat", "json"), ("chat", "gzip"), ("chat", "json-values"), ("responses", "json"), ("messages", "json")],
)
def test_an_endless_answer_is_cut(api: str, kind: str) -> None:
    cost = call(kind, stream=False, api=api)
    assert (cost.kind, cost.mb < 200) == ("ProviderError", True), cost
    assert f"sent a response that exceeds the limit of 32 MiB{TOO_LARGE}" in cost.message and "\n" not in cost.message


@pytest.mark.parametrize(
    ("api", "kind", "limit"),
    [
        ("chat", "event", "32 MiB"),
        ("responses", "event", "32 MiB"),
        ("messages", "event", "32 MiB"),
        ("chat", "data-lines", "32 MiB"),
        ("chat", "list-events", "2,000,000 JSON values"),
        ("chat", "call-events", "1,000 tool calls"),
        ("responses", "item-events", "1,000 output items"),
        ("responses", "long-item-events", "32 MiB"),
        ("messages", "block-events", "1,000 content blocks"),
        pytest.param("chat", "text-events", "32 MiB", marks=pytest.mark.campaign),
        pytest.param("responses", "response-text-events", "128 MiB of stream events", marks=pytest.mark.campaign),
        pytest.param("messages", "message-text-events", "32 MiB", marks=pytest.mark.campaign),
        pytest.param("messages", "message-delta-events", "2,000,000 JSON values", marks=pytest.mark.campaign),
        pytest.param("chat", "logprob-events", "2,000,000 JSON values", marks=pytest.mark.campaign),
        pytest.param("chat", "comments", "128 MiB of stream events", marks=pytest.mark.campaign),
        pytest.param("chat", "empty-events", "128 MiB of stream events", marks=pytest.mark.campaign),
    ],
)
def test_an_endless_stream_is_cut(api: str, kind: str, limit: str) -> None:
    cost = call(kind, stream=True, api=api)
    assert (cost.kind, cost.mb < 200) == ("ProviderError", True), cost
    assert f"sent a response that exceeds the limit of {limit}{TOO_LARGE}" in cost.message and "\n" not in cost.message


SMALLER = """
from reward_kit.providers import completion
completion.MODEL_STREAM_BYTES, completion.MODEL_ANSWER_BYTES, completion.MODEL_ANSWER_VALUES = 4 * 2**20, 2**20, 20_000
"""


@pytest.mark.parametrize(
    ("api", "kind", "limit"),
    [
        ("chat", "text-events", "1 MiB"),
        ("responses", "response-text-events", "4 MiB of stream events"),
        ("messages", "message-text-events", "1 MiB"),
        ("messages", "message-delta-events", "20,000 JSON values"),
        ("chat", "logprob-events", "20,000 JSON values"),
        ("chat", "comments", "4 MiB of stream events"),
        ("responses", "comments", "4 MiB of stream events"),
        ("messages", "comments", "4 MiB of stream events"),
        ("chat", "empty-events", "4 MiB of stream events"),
    ],
)
def test_an_endless_stream_of_small_events_is_cut(api: str, kind: str, limit: str) -> None:
    cost = call(kind, stream=True, prepare=SMALLER, api=api)
    assert (cost.kind, cost.mb < 30) == ("ProviderError", True), cost
    assert f"sent a response that exceeds the limit of {limit}{TOO_LARGE}" in cost.message


@pytest.mark.parametrize("kind", ["error", "refusal", "header", "headers", "trailers"])
def test_an_endless_error_body_or_header_is_cut(kind: str) -> None:
    cost = call(kind, stream=False)
    assert (cost.kind, cost.mb < 200) == ("ProviderError", True), cost
    assert len(cost.message) < 2_000 and "\n" not in cost.message


def test_data_after_the_end_of_a_stream_is_not_read() -> None:
    cost = call("after-done", stream=True)
    assert (cost.kind, cost.mb < 50) == ("", True), cost

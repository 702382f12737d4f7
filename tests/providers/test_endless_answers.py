"""Answers without an end are cut at a documented size with one error and little memory."""

from __future__ import annotations

import pytest

from tests.endless_server import Peak, endless, peak

PREPARE = """
import aiohttp
from reward_kit.providers.chat import ChatEndpoint
from reward_kit.providers.request_queue import RetryPolicy
"""
CALL = """
endpoint = ChatEndpoint("http://127.0.0.1:{port}/v1", "key", retry=RetryPolicy(base_s=0.01), total_timeout_s=60)
try:
    await endpoint.complete({{"model": "m", "messages": [{{"role": "user", "content": "x"}}], "stream": {stream}}})
finally:
    await endpoint.aclose()
"""
TOO_LARGE = "; the rest was not read"


def call(kind: str, stream: bool, most_mb: int = 0, prepare: str = "") -> Peak:
    with endless(kind, most_mb) as port:
        return peak(PREPARE + prepare, CALL.format(port=port, stream=stream))


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("json", "32 MiB"), ("gzip", "32 MiB"), ("json-values", "32 MiB")],
)
def test_an_endless_answer_is_cut(kind: str, limit: str) -> None:
    cost = call(kind, stream=False)
    assert (cost.kind, cost.mb < 200) == ("ProviderError", True), cost
    assert f"sent an answer that exceeds the limit of {limit}{TOO_LARGE}" in cost.message and "\n" not in cost.message


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("event", "32 MiB"),
        ("data-lines", "32 MiB"),
        ("list-events", "2,000,000 JSON values"),
        ("call-events", "1,000 tool calls"),
        pytest.param("text-events", "32 MiB", marks=pytest.mark.campaign),
        pytest.param("logprob-events", "2,000,000 JSON values", marks=pytest.mark.campaign),
        pytest.param("comments", "128 MiB of stream events", marks=pytest.mark.campaign),
        pytest.param("empty-events", "128 MiB of stream events", marks=pytest.mark.campaign),
    ],
)
def test_an_endless_stream_is_cut(kind: str, limit: str) -> None:
    cost = call(kind, stream=True)
    assert (cost.kind, cost.mb < 200) == ("ProviderError", True), cost
    assert f"sent an answer that exceeds the limit of {limit}{TOO_LARGE}" in cost.message and "\n" not in cost.message


SMALLER = """
from reward_kit.providers import completion
completion.MODEL_STREAM_BYTES, completion.MODEL_ANSWER_BYTES, completion.MODEL_ANSWER_VALUES = 4 * 2**20, 2**20, 20_000
"""


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("text-events", "1 MiB"),
        ("logprob-events", "20,000 JSON values"),
        ("comments", "4 MiB of stream events"),
        ("empty-events", "4 MiB of stream events"),
    ],
)
def test_an_endless_stream_of_small_events_is_cut(kind: str, limit: str) -> None:
    cost = call(kind, stream=True, prepare=SMALLER)
    assert (cost.kind, cost.mb < 30) == ("ProviderError", True), cost
    assert f"sent an answer that exceeds the limit of {limit}{TOO_LARGE}" in cost.message


@pytest.mark.parametrize("kind", ["error", "refusal", "header", "headers", "trailers"])
def test_an_endless_error_body_or_header_is_cut(kind: str) -> None:
    cost = call(kind, stream=False)
    assert (cost.kind, cost.mb < 200) == ("ProviderError", True), cost
    assert len(cost.message) < 2_000 and "\n" not in cost.message


def test_data_after_the_end_of_a_stream_is_not_read() -> None:
    cost = call("after-done", stream=True)
    assert (cost.kind, cost.mb < 50) == ("", True), cost

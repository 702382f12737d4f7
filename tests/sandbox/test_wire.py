"""Messages between a host and a sandbox elsewhere: what is sent is what is read, and all else is one kind of error."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.errors import Failure
from reward_kit.sandbox.frames import decode
from reward_kit.sandbox.limits import Limits
from reward_kit.sandbox.outcome import Outcome
from reward_kit.sandbox.program import Program
from reward_kit.sandbox.wire import (
    HEADER,
    MAGIC,
    Answer,
    Greeting,
    WireError,
    fields_of,
    most_bytes_of,
    packed,
    program_from,
    read_as,
    read_message,
    told,
    values_of,
)
from tests.profiles import examples

PIECES = st.one_of(
    st.binary(max_size=40),
    st.builds(HEADER.pack, st.just(MAGIC), st.integers(0, 60), st.integers(0, 80)),
    st.just(packed({"id": 1, "outcomes": [], "refusal": ""}, b"[]")),
)


def fed(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def read_all(data: bytes, most: int) -> list[tuple[bytes, bytes]]:
    reader, found = fed(data), []
    while (message := await read_message(reader, lambda: most)) is not None:
        found.append(message)
    return found


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(PIECES, max_size=5).map(b"".join))
def test_any_bytes_are_messages_or_a_wire_error(data):
    try:
        messages = asyncio.run(read_all(data, 120))
    except WireError:
        return
    assert b"".join(HEADER.pack(MAGIC, len(head), len(body)) + head + body for head, body in messages) == data
    for head, _ in messages:
        try:
            read_as(Answer, head)
        except WireError as error:
            assert "what is no answer" in str(error)


@settings(max_examples=examples(50), deadline=None)
@given(st.text(max_size=30), st.booleans(), st.lists(st.sampled_from(["os", "json.decoder"]), max_size=2))
def test_a_program_arrives_as_it_was_sent(source, is_async, imports):
    program = Program(source + "\ud800", "solve", "é.py", "plain", tuple(imports), ("/a",), ("/b",), is_async)
    order = {"id": 1, "do": "call", "program": fields_of(program)}
    ((head, body),) = asyncio.run(read_all(packed(order, b"[]"), 4096))
    assert program_from(json.loads(head)["program"]) == program
    assert body == b"[]"


@settings(max_examples=examples(100), deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=100), st.text(max_size=100), st.sampled_from([0, 1]))
def test_an_outcome_arrives_within_its_bound(value, printed, failed):
    limits = Limits(result_kb=1, output_kb=1)
    failure = Failure("crash", "Sandbox", printed, "trace") if failed else None
    printed = printed.encode("utf-8", "replace").decode()
    outcome = Outcome(None if failed else value, failure, "exception" if failed else "ok", printed, printed)
    message = packed(Answer(id=7, outcomes=[told(outcome)]), values_of([outcome]))
    assert len(message) <= most_bytes_of(limits, 1)
    ((head, body),) = asyncio.run(read_all(message, most_bytes_of(limits, 1)))
    (arrived,) = read_as(Answer, head).outcomes
    assert (arrived.stdout, decode(body)) == (printed, [outcome.value])
    assert (arrived.failure is None) == (not failed)


def test_a_length_is_refused_before_anything_is_stored():
    data = HEADER.pack(MAGIC, 1 << 20, 1 << 31)
    with pytest.raises(WireError, match=r"2,148,532,224 bytes where at most 100 are due"):
        asyncio.run(read_all(data, 100))


@pytest.mark.parametrize(
    "head", [b"", b"{}", b'{"protocol": 1}', b'{"protocol": "1", "reward_kit": "x", "processors": 1}', b"\xff", b"[]"]
)
def test_a_head_that_is_another_is_refused(head):
    with pytest.raises(WireError, match="what is no greeting"):
        read_as(Greeting, head)

"""Test request bodies of every kind: accepted, or rejected with a field, with work bounded by their size."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from reward_kit.episodes.json_codec import to_json_value
from reward_kit.integrations.reward_server.options import RefusedError, ServerOptions
from reward_kit.integrations.reward_server.wire import parse_requests

OPTIONS = ServerOptions()
LEAVES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 10**20, "", "x", "user", "assistant", "typed", [], {}),
    *("QUJD", "not base64", "<f4", "O", "nan", "\u00e9"),
)
KEYS = (
    *(
        "messages",
        "role",
        "content",
        "rollout_id",
        "ground_truth",
        "assistant_turns",
        "sample",
        "state",
        "kind",
        "payload",
    ),
    *("episode", "extra", "codec", "rollouts", "tool_calls", "function", "id", "name", "schema_version", "steps", "x"),
    *("__type__", "value", "dtype", "shape"),
)
TYPES = ("float", "int", "tuple", "message", "dict", "array", "scalar", "text", "bytes", "nosuch")


def junk(draw: random.Random, depth: int = 0) -> Any:
    """Return a JSON value that resembles a request."""
    kind = draw.random()
    if depth > 5 or kind < 0.3:
        return draw.choice(LEAVES)
    if kind < 0.5:
        return [junk(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind < 0.65:
        coded = {"__type__": draw.choice(TYPES), "value": junk(draw, depth + 1)}
        return {**coded, "dtype": draw.choice(LEAVES), "shape": junk(draw, depth + 1)}
    return {draw.choice(KEYS): junk(draw, depth + 1) for _ in range(draw.randrange(5))}


def request_like(draw: random.Random) -> dict[str, Any]:
    """Return a request in which one or several parts are arbitrary."""
    message = {"role": "assistant", "content": "x"}
    rollout: dict[str, Any] = {"messages": [message, draw.choice([message, junk(draw)])]}
    for name in draw.sample(KEYS[3:13], draw.randrange(4)):
        rollout[name] = junk(draw)
    return {**rollout, "codec": draw.choice(["plain", "typed", "typed", junk(draw)])}


async def asked(value: Any, *, is_batch: bool = False, options: ServerOptions = OPTIONS) -> Any:
    body = bytearray(value if isinstance(value, bytes) else json.dumps(value).encode())
    return await parse_requests(body, options, is_batch=is_batch, wants_episodes=True)


async def test_random_bodies_are_read_or_rejected() -> None:
    draw, read, refused = random.Random(11), 0, set()
    for _ in range(3000):
        is_batch = draw.random() < 0.3
        value = draw.choice([junk, request_like])(draw)
        value = {"rollouts": [value], "codec": "typed"} if is_batch and isinstance(value, dict) else value
        try:
            requests, _ = await asked(value, is_batch=is_batch)
            read += len(requests)
        except RefusedError as refusal:
            assert refusal.status in (400, 422)
            refused.add(str(refusal).partition(":")[0])
    assert read > 100 and len(refused) > 30


async def test_bodies_with_changed_bytes_are_read_or_rejected() -> None:
    draw = random.Random(12)
    message = {"role": "user", "content": "aé\ud83d\ude00"}
    whole = json.dumps({"messages": [message], "sample": {"a": [1.5e3, None]}}).encode()
    for _ in range(2000):
        body = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            body[draw.randrange(len(body))] = draw.choice(b'"{}[],:\\0N\xff\xc3e-.u')
        try:
            await asked(bytes(body))
        except RefusedError as refusal:
            assert refusal.status in (400, 422)


@pytest.mark.parametrize("part", ["content", "tool_calls"])
@pytest.mark.parametrize("codec", ["plain", "typed"])
async def test_long_lists_of_errors_are_not_reported_individually(part: str, codec: str) -> None:
    message: Any = {"role": "user", part: [0] * 200_000}
    wrapped = {"__type__": "dict", "value": [[to_json_value(key), value] for key, value in message.items()]}
    for shape in [message] if codec == "plain" else [message, wrapped]:
        with pytest.raises(RefusedError, match=f"messages.0.{part}: 200000 parts; the maximum is 10000") as caught:
            await asked({"messages": [shape], "codec": codec})
        assert caught.value.status == 422
    for name in ("messages", "assistant_turns"):
        with pytest.raises(RefusedError) as caught:
            await asked({"messages": [], name: ["x"] * 9_000})
        assert len(str(caught.value)) < 1000


async def test_small_body_cannot_allocate_much_memory() -> None:
    coded = {"__type__": "scalar", "dtype": "V1", "value": 1_000_000}  # bytes that NumPy would make of it
    with pytest.raises(RefusedError, match=r"a scalar of type .V1. must be a number, got 1000000") as caught:
        await asked({"messages": [], "ground_truth": coded, "codec": "typed"})
    assert caught.value.status == 422


async def test_error_message_shows_short_values_only() -> None:
    cases = [("environment_return", "x" * 1000, "x" * 60), ("environment_return", 10**4000, "")]
    cases += [("stop_reason", value, shown) for value, shown in ((["x"], "a list"), ({"a": 1}, "a dict"), (7, "7"))]
    for field, value, shown in (*cases, ("stop_reason", 10**4000, "an int")):
        with pytest.raises(RefusedError) as caught:
            await asked({"messages": [], field: value})
        message = str(caught.value)
        assert message.startswith(f"{field}: ") and shown in message and len(message) < 200


async def test_the_first_invalid_rollout_of_a_batch_is_named() -> None:
    good, bad = {"messages": []}, {"messages": [{"role": "x"}]}
    requests, codec = await asked({"rollouts": [good] * 3}, is_batch=True)
    assert ([request.rollout_id for request in requests], codec) == (["0", "1", "2"], "plain")
    with pytest.raises(RefusedError, match=r"^rollouts\.2\.messages\.0\.role: "):
        await asked({"rollouts": [good, good, bad, bad]}, is_batch=True)


async def test_large_body_is_read() -> None:
    value = {"messages": [{"role": "assistant", "content": "é" * 300}] * 1500, "ground_truth": {"a": [1, None]}}
    ((request,), _) = await asked(value)
    assert (len(request.messages), request.ground_truth) == (1500, {"a": [1, None]})
    assert list(request.assistant_turns) == list(range(1500))

"""Cassettes record provider exchanges, replay them offline and report missing ones."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from reward_kit.errors import ConfigError, DeadlineError, LimitError, ProviderError
from reward_kit.providers import Cassette, ChatEndpoint, ProviderSession, Rates, RetryPolicy
from reward_kit.providers.chat import DIALECTS
from reward_kit.providers.dialect import Dialect
from reward_kit.providers.faults import ENDPOINT_ERRORS
from tests.chat_server import ChatServer, answer, silent, status, tool_calls

FAST = RetryPolicy(max_attempts=3, base_s=0.001)


def request(*texts: str, **options):
    return {"model": "m", "messages": [{"role": "user", "content": text} for text in texts], **options}


def closed_url() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


class EndpointClient:
    """A client of one endpoint that closes everything; outcomes are completions or errors."""

    def __init__(self, url: str, cassette: Cassette, dialect: Dialect | None = None) -> None:
        self.traffic = ProviderSession(cassette=cassette)
        options = {"retry": FAST, "traffic": self.traffic, "idle_timeout_s": 0.2, "dialect": dialect}
        self.chat = ChatEndpoint(url, "key-1", **options)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.chat.aclose()
        self.traffic.close()

    async def __call__(self, asked, scope="e1"):
        try:
            return await self.chat.complete(asked, scope=scope)
        except ENDPOINT_ERRORS as error:
            return type(error), str(error)


async def record(path, script, questions):
    async with ChatServer(script) as server, EndpointClient(server.base_url, Cassette.record(path)) as ask:
        return [await ask(*question) for question in questions]


async def replay(path, questions):
    async with EndpointClient(closed_url(), Cassette.replay(path)) as ask:
        outcomes = [await ask(*question) for question in questions]
        assert ask.chat._transport._session is None  # no connection was ever made
        return outcomes


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


QUESTIONS = [
    (request("a"),),
    (request("a"),),
    (request("a", "b", stream=True),),
    (request("broken"),),
    (request("refused"),),
    (request("long"),),
    (request("a"), "e2"),
    (request("silent"),),
]


LONG = status(400, error={"message": "too long", "code": "context_length_exceeded"})


def misbehave(body):
    text = body["messages"][-1]["content"]
    misbehave.count += 1
    special = {"broken": status(500), "refused": status(400, text="no"), "silent": silent(), "long": LONG}
    said = tool_calls([("move", {"n": misbehave.count})], f"Grüße {misbehave.count} \ud83d")
    return special.get(text, said)


misbehave.count = 0


async def test_replay_returns_recorded_answers_and_errors_without_a_connection(tmp_path):
    path = tmp_path / "tape" / "c.jsonl"
    recorded = await record(path, misbehave, QUESTIONS)
    assert (
        recorded[0] != recorded[1]
        and recorded[3][0] is ProviderError
        and recorded[7][0] is DeadlineError
        and recorded[5][0] is LimitError
    )
    assert await replay(path, QUESTIONS) == recorded


async def test_each_episode_gets_its_own_answers_in_any_request_order(tmp_path):
    path = tmp_path / "c.jsonl"
    questions = [(request("a"), f"e{n % 5}") for n in range(20)]
    recorded = await record(path, misbehave, questions)
    order = sorted(range(20), key=lambda n: (n % 5, n))
    replayed = await replay(path, [questions[n] for n in order])
    assert replayed == [recorded[n] for n in order]


async def test_recorded_lines_hold_requests_outcomes_and_no_api_key(tmp_path):
    path = tmp_path / "c.jsonl"
    await record(path, [status(500), answer("x"), status(400, text="no")], [(request("a"),), (request("b"),)])
    header, first, second = lines(path)
    assert header.keys() == {"schema_version", "created"} and header["schema_version"] == 1
    assert first["request"] == request("a")
    assert (first["scope"], first["occurrence"], first["url"], first["retries"]) == ("e1", 0, "/v1/chat/completions", 1)
    assert first["answer"]["choices"][0]["message"]["content"] == "x"
    assert second["error"]["class"] == "ProviderError" and "HTTP 400: no" in second["error"]["message"]
    assert "key-1" not in path.read_text()


async def test_request_matching_ignores_field_order_but_not_option_values(tmp_path):
    path = tmp_path / "c.jsonl"
    await record(path, misbehave, [(request("a", seed=1, top_p=0.5),)])
    turned = dict(reversed(request("a", seed=1, top_p=0.5).items()))
    same, other = await replay(path, [(turned,), (request("a", seed=2, top_p=0.5),)])
    assert same.message.text.startswith("Grüße")
    assert other[1].endswith("the two requests differ at seed: 1 became 2")


async def test_unused_recorded_answer_is_used_for_another_episode(tmp_path):
    path = tmp_path / "c.jsonl"
    recorded = await record(path, misbehave, [(request("a"), "e1"), (request("a"), "e2")])
    replayed = await replay(path, [(request("a"), "new"), (request("a"), "e2"), (request("a"), "e3")])
    assert replayed[:2] == recorded
    assert "it was recorded 2 times, and all recorded responses have been used" in replayed[2][1]


async def test_unrecorded_request_error_names_the_nearest_recorded_request(tmp_path):
    path = tmp_path / "c.jsonl"
    await record(path, misbehave, [(request("a"),), (request("a", "b", "c"),), (request("x", "y", "z"),)])
    ((kind, message),) = await replay(path, [(request("a", "b", "other"),)])
    assert kind is ProviderError
    assert message == (
        f"{path} has no response to the request of episode e1 to m with 3 messages, the last one from user: 'other'; "
        "the most similar request is in line 3, the request of episode e1 to m with 3 messages, "
        "the last one from user: 'c'; "
        "the two requests differ at messages[2].content: 'c' became 'other'"
    )


@pytest.mark.parametrize("api", DIALECTS)
async def test_unrecorded_request_is_described_in_every_api(tmp_path, api):
    path, dialect = tmp_path / "c.jsonl", DIALECTS[api]
    async with ChatServer([answer()]) as server, EndpointClient(server.base_url, Cassette.record(path), dialect) as ask:
        await ask(request("a", "b"))
    async with EndpointClient(closed_url(), Cassette.replay(path), dialect) as ask:
        assert (await ask(request("a", "b"))).message.text == "ok"
        kind, message = await ask(request("a", "other"))
    assert kind is ProviderError and "the last one from user:" in message and "other" in message
    assert "the two requests differ at messages[" in message


async def test_unrecorded_request_error_reports_length_difference_or_empty_recording(tmp_path):
    path, empty = tmp_path / "c.jsonl", tmp_path / "empty.jsonl"
    await record(path, misbehave, [(request("a"),)])
    await record(empty, misbehave, [])
    ((_, message),) = await replay(path, [(request("a", "b"),)])
    assert message.endswith("the two requests differ at messages: 1 became 2")
    ((_, message),) = await replay(empty, [(request("a"),)])
    assert message.endswith("the recording is empty")


async def test_recording_resumes_after_a_kill_and_replaces_restarted_episodes(tmp_path):
    path = tmp_path / "c.jsonl"
    first = await record(path, misbehave, [(request("a"), "done"), (request("a"), "cut"), (request("b"), "cut")])
    path.write_bytes(path.read_bytes()[:-20])  # killed in the middle of a line
    second = await record(path, misbehave, [(request("a"), "cut"), (request("b"), "cut")])
    assert [line["occurrence"] for line in lines(path) if line.get("scope") == "cut"] == [0, 1, 0]
    replayed = await replay(path, [(request("a"), "cut"), (request("b"), "cut"), (request("a"), "done")])
    assert replayed == [*second, first[0]]


async def test_incomplete_last_line_is_not_replayed(tmp_path):
    path = tmp_path / "c.jsonl"
    recorded = await record(path, misbehave, [(request("a"),), (request("b"),)])
    path.write_bytes(path.read_bytes()[:-1])
    first, second = await replay(path, [(request("a"),), (request("b"),)])
    assert first == recorded[0]
    assert "has no response" in second[1]


@pytest.mark.parametrize("text", ["important notes\n", "important", '{"a": 1}\n', '{"schema_version": "x"}\n', "[1]\n"])
def test_other_files_are_neither_replayed_nor_overwritten(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    for use in (Cassette.record, Cassette.replay):
        with pytest.raises(ConfigError, match=r"notes\.txt is not a recording"):
            use(path)
    assert path.read_text() == text


def test_incomplete_header_is_rewritten(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"schema_ver')
    Cassette.record(path).close()
    assert len(lines(path)) == 1


def test_damaged_line_newer_version_and_missing_file_are_config_errors(tmp_path):
    path = tmp_path / "c.jsonl"
    Cassette.record(path).close()
    header = path.read_text()
    path.write_text(header + "oops\n" + header)
    with pytest.raises(ConfigError, match=r"c\.jsonl:2: this line is not a recorded exchange"):
        Cassette.replay(path)
    path.write_text('{"schema_version": 2}\n')
    with pytest.raises(ConfigError, match="recorded by a later version"):
        Cassette.record(path)
    with pytest.raises(ConfigError, match=r"none cannot be read: No such file or directory$"):
        Cassette.replay(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        Cassette.record(tmp_path)


def test_recording_locks_out_a_second_recorder(tmp_path):
    first = Cassette.record(tmp_path / "c.jsonl")
    with pytest.raises(ConfigError, match="is being written by a different process"):
        Cassette.record(tmp_path / "c.jsonl")
    first.close()
    Cassette.record(tmp_path / "c.jsonl").close()


async def test_replay_ignores_rate_limits(tmp_path):
    path = tmp_path / "c.jsonl"
    await record(path, misbehave, [(request("a"),)] * 20)
    shared = ProviderSession(cassette=Cassette.replay(path))
    chat = ChatEndpoint(closed_url(), traffic=shared, rates=Rates(requests_per_minute=1, max_connections=1))
    async with asyncio.timeout(5):
        await asyncio.gather(*(chat.complete(request("a"), scope="e1") for _ in range(20)))
    shared.close()


async def test_cancelled_request_is_not_recorded(tmp_path):
    path = tmp_path / "c.jsonl"
    async with ChatServer(lambda _: silent()) as server, EndpointClient(server.base_url, Cassette.record(path)) as ask:
        task = asyncio.create_task(ask(request("a")))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(lines(path)) == 1


async def test_redacted_request_is_still_matched_on_replay(tmp_path):
    async with ChatServer([answer("fine")]) as server:
        cassette = Cassette.record(tmp_path / "c.jsonl")
        cassette.redact = lambda line: line.replace(b"hunter2", b"(hidden)")
        chat = ChatEndpoint(server.base_url, traffic=ProviderSession(cassette=cassette))
        request = {"model": "m", "messages": [{"role": "user", "content": "my word is hunter2"}]}
        recorded = await chat.complete(request)
        await chat.aclose()
        cassette.close()
    assert b"hunter2" not in (tmp_path / "c.jsonl").read_bytes()
    replay = Cassette.replay(tmp_path / "c.jsonl")
    replaying = ChatEndpoint("http://127.0.0.1:9/v1", traffic=ProviderSession(cassette=replay))
    assert await replaying.complete(request) == recorded
    replay.close()


def test_oversized_or_deeply_nested_line_is_rejected_with_its_number(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("reward_kit.providers.cassette.RECORDED_LINE_BYTES", 20_000)
    path = tmp_path / "answers.jsonl"
    header = '{"schema_version": 1}\n'
    for line, problem in (
        ("x" * 30_000, ":2: this line is larger than the limit of"),
        ("[" * 15_000, ":2: this line is not a recorded exchange"),
        ('{"key": "k", "scope": "", "occurrence": 0, "request": 1}', ":2: this line is not a recorded exchange"),
    ):
        path.write_text(f"{header}{line}\n")
        with pytest.raises(ConfigError) as raised:
            Cassette.replay(path)
        assert str(raised.value).startswith(f"{path}{problem}")
    path.write_text("x" * 30_000)
    with pytest.raises(ConfigError, match="is not a recording"):
        Cassette.replay(path)

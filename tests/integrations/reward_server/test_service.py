"""Test the answers of a reward server: scores, errors and authentication."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging

import anyio
import jsonschema
import pytest

from reward_kit.errors import ConfigError
from reward_kit.integrations.reward_server.options import Keys, ServerOptions
from reward_kit.integrations.reward_server.server import NamedReward, serving
from reward_kit.typed_interface import reward_function, reward_spec
from tests.integrations.reward_server.running_server import KEY, ROLLOUT, RawClient, server


@reward_function
async def exact(messages, ground_truth):
    return {"score": float(messages[-1].text == ground_truth), "reason": "compared"}


@reward_function(mode="batch")
async def longest(rollouts_messages, ground_truths=None):
    lengths = [len(messages[-1].text) for messages in rollouts_messages]
    return [{"score": length / max(lengths)} for length in lengths]


@reward_function
async def broken(messages):
    raise KeyError(messages[-1].text)


class Gate:
    """A reward whose calls wait until the test releases them."""

    def __init__(self) -> None:
        self.waiting, self.cancelled = 0, 0
        self.opened = asyncio.Event()
        self.changed = asyncio.Condition()

        @reward_function(id="gated")
        async def gated(messages):
            await self._count(1)
            try:
                await self.opened.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            finally:
                await asyncio.shield(self._count(-1))
            return {"score": 1.0}

        self.reward = gated

    async def _count(self, by: int) -> None:
        async with self.changed:
            self.waiting += by
            self.changed.notify_all()

    async def until(self, waiting: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.waiting == waiting)


@pytest.fixture
async def asker():
    opened, ended = asyncio.get_running_loop().create_future(), asyncio.Event()

    async def serve() -> None:  # in one task, which a fixture has not
        async with server(exact, longest, broken) as found:
            opened.set_result(found)
            await ended.wait()

    task = asyncio.create_task(serve())
    await asyncio.wait([task, opened], return_when=asyncio.FIRST_COMPLETED)
    yield opened.result()
    ended.set()
    await task


async def refusal(asker: RawClient, body: object, name: str = "exact/score") -> tuple[int, str]:
    answer = await asker.post(f"/v1/rewards/{name}", body)
    assert answer.json()["error"]["code"]
    return answer.status, answer.message


class TestScores:
    async def test_rollout_is_scored_with_every_field(self, asker: RawClient) -> None:
        answer = await asker.score("exact")
        payload = answer.json()
        assert answer.status == 200 and payload.pop("duration_s") >= 0
        assert payload == {
            "rollout_id": "0",
            "score": 1.0,
            "result": payload["result"],
            "error": None,
            "sandbox": {"level": "in_process"},
            "stdout": "",
            "stderr": "",
            "is_output_cut": False,
            "retry_after_s": None,
        }
        assert payload["result"]["reason"] == "compared"

    async def test_unscored_rollout_has_a_null_score_and_failure_class_with_http_200(self, asker: RawClient) -> None:
        payload = (await asker.score("broken")).json()
        assert (payload["score"], payload["result"], payload["error"]["class"]) == (None, None, "crash")
        assert "KeyError: '42'" in payload["error"]["message"]
        lacks = (await asker.score("exact", {"messages": [], "ground_truth": 7})).json()
        assert lacks["score"] is None and lacks["error"]["class"] == "crash"

    async def test_rollouts_are_scored_separately_or_as_a_group(self, asker: RawClient) -> None:
        rollouts = [
            {
                "rollout_id": f"r{length}",
                "messages": [{"role": "assistant", "content": "x" * length}],
                "ground_truth": "",
            }
            for length in (4, 1, 2)
        ]
        batch = {"rollouts": [*rollouts, {"messages": []}]}
        payload = (await asker.post("/v1/rewards/exact/score_batch", batch)).json()["scores"]
        assert [one["rollout_id"] for one in payload] == ["r4", "r1", "r2", "3"]
        assert [one["score"] for one in payload] == [0.0, 0.0, 0.0, None]
        payload = (await asker.post("/v1/rewards/longest/score_batch", {"rollouts": rollouts})).json()["scores"]
        assert [one["score"] for one in payload] == [1.0, 0.25, 0.5]
        assert (await asker.score("longest", rollouts[0])).json()["score"] == 1.0

    async def test_assistant_messages_are_steps_by_default(self) -> None:
        @reward_function
        async def turns(messages, assistant_turns, sample, stop_reason, goal_description):
            facts = [assistant_turns, sample, stop_reason, goal_description]
            return {"score": 0.0, "reason": json.dumps(facts)}

        messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "tool", "assistant")]
        body = {"messages": messages, "sample": {"a": [1]}, "stop_reason": "x", "extra": {"goal_description": "win"}}
        async with server(turns) as asker:
            for given, expected in (({}, [1, 3]), ({"assistant_turns": [3]}, [3])):
                payload = (await asker.score("turns", {**body, **given})).json()
                assert json.loads(payload["result"]["reason"]) == [expected, {"a": [1]}, "x", "win"]

    async def test_call_beyond_its_deadline_is_unscored_as_a_timeout(self) -> None:
        gate = Gate()
        async with server(gate.reward, deadline_s=0.05) as asker:
            payload = (await asker.score("gated", {"messages": []})).json()
        assert (payload["score"], payload["error"]["class"]) == (None, "timeout")

    async def test_unreadable_episode_is_unscored_if_the_reward_uses_steps(self) -> None:
        @reward_function
        async def steps(messages, step_data):
            return {"score": float(len(step_data))}

        async with server(steps, exact) as asker:
            payload = (await asker.score("steps", {"messages": [], "episode": {"schema_version": 99}})).json()
            assert (payload["score"], payload["error"]["class"]) == (None, "refused")
            assert (
                "the episode cannot be read" in payload["error"]["message"]
                or "version 99" in payload["error"]["message"]
            )
            assert (await asker.score("exact", {**ROLLOUT, "episode": {"schema_version": 99}})).json()["score"] == 1.0

    async def test_disconnecting_client_cancels_its_call(self) -> None:
        gate = Gate()
        async with server(gate.reward) as asker:
            body = json.dumps({"messages": []}).encode()
            _, writer = await asker.open(
                "POST",
                "/v1/rewards/gated/score",
                **{"Content-Type": "application/json", "Content-Length": str(len(body))},
            )
            writer.write(body)
            await gate.until(1)
            writer.transport.abort()
            await gate.until(0)
            assert gate.cancelled == 1
            figures = (await asker.get("/metrics")).body.decode()
        assert 'reward_kit_serve_pending{reward="gated"} 0' in figures
        assert 'reward_kit_serve_requests_total{route="score",status="499"} 1' in figures


ROUTES = [
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/rewards"),
    ("GET", "/v1/rewards/exact"),
    ("POST", "/v1/rewards/exact/score"),
    ("POST", "/v1/rewards/exact/score_batch"),
    ("POST", "/v1/rewards/nosuch/score"),
    ("POST", "/health"),
    ("GET", "/"),
    ("GET", "/nosuch"),
    ("OPTIONS", "/v1/rewards"),
    ("DELETE", "/v1/rewards/exact"),
]
WRONG = {
    "none": {},
    "empty": {"Authorization": "Bearer "},
    "another": {"Authorization": "Bearer another-key-than-the-right-one"},
    "the begin of it": {"Authorization": f"Bearer {KEY[:-1]}"},
    "more than it": {"Authorization": f"Bearer {KEY}x"},
    "another scheme": {"Authorization": f"Basic {KEY}"},
    "no scheme": {"Authorization": KEY},
    "in another header": {"X-Api-Key": KEY},
}


class TestKeys:
    @pytest.mark.parametrize("wrong", WRONG)
    async def test_only_health_answers_without_a_key(self, asker: RawClient, wrong: str) -> None:
        answers = []
        for method, path in ROUTES:
            body = json.dumps(ROLLOUT).encode() if method == "POST" else b""
            headers = {**WRONG[wrong], "Content-Type": "application/json"}
            answers.append(await asker.ask(method, path, body, None, **headers))
        # One answer for all: it does not even tell what there is.
        assert {(one.status, one.body, one.headers["www-authenticate"]) for one in answers} == {
            (401, answers[0].body, "Bearer")
        }
        health = await asker.get("/health", None, **WRONG[wrong])
        assert (health.status, health.json()) == (200, {"status": "ok"})
        figures = (await asker.get("/metrics")).body.decode()
        assert f'status="401"}} {len(ROUTES)}' in figures and "rollouts_total{" not in figures

    async def test_duplicate_key_or_key_in_the_url_is_rejected(self, asker: RawClient) -> None:
        assert (await asker.get(f"/v1/rewards?key={KEY}&token={KEY}", None)).status == 401
        reader, writer = await asker.open("GET", "/v1/rewards", **{"authorization": "Bearer something-else-here"})
        assert (await asker.answer(reader, writer)).status == 401

    async def test_every_configured_key_is_accepted_and_logged_by_number(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        keys = ("the-first-key-of-two", "the-second-key-of-two")
        caplog.set_level(logging.DEBUG, "reward_kit")
        async with server(exact, keys=keys) as asker:
            for key in keys:
                assert (await asker.get("/v1/rewards", key)).status == 200
                assert (await asker.get("/v1/rewards", key + "x")).status == 401
        ours = [record for record in caplog.records if record.name.endswith("reward_server")]
        assert [record.key for record in ours] == [1, None, 2, None]
        assert not any(key in str(vars(record)) for key in keys for record in caplog.records)

    async def test_connection_without_a_key_is_closed_after_its_first_answer(self, asker: RawClient) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", asker.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
        data = await reader.read()
        writer.close()
        assert data.count(b"HTTP/1.1 200") == 1

    def test_weak_or_unsendable_key_is_rejected_without_showing_it(self) -> None:
        for keys, told in (((), "needs a key"), (("short",), "5 characters"), (("with a blank in it",), "a space")):
            with pytest.raises(ConfigError, match=told) as caught:
                Keys(keys)
            assert not any(key in str(caught.value) for key in keys)


class TestRefusals:
    async def test_invalid_requests_name_the_field(self, asker: RawClient) -> None:
        message = {"role": "user", "content": "x"}
        cases = [
            ({}, 422, "messages: missing"),
            ([1], 422, "(top level): expected an object"),
            ({"messages": [message, {"role": "bot"}]}, 422, "messages.1.role: "),
            ({"messages": [message], "grond_truth": 1}, 422, "grond_truth: unknown key"),
            ({"messages": "hello"}, 422, "messages: "),
            ({"messages": [], "environment_return": "1"}, 422, "environment_return: "),
            ({"messages": [], "environment_return": True}, 422, "environment_return: "),
            ({"messages": [], "assistant_turns": [0, "1"]}, 422, "assistant_turns.1: "),
            ({"messages": [], "state": {"kind": "json", "payload": "not base64"}}, 422, "state.payload: "),
            ({"messages": [], "codec": "pickle"}, 422, "codec: "),
            ({"messages": [{"role": "user", "content": [{}] * 10_001}]}, 422, "messages.0.content: 10001 parts"),
        ]
        for body, status, start in cases:
            found = await refusal(asker, body)
            assert found[0] == status and found[1].startswith(start), found
        batches = [
            ({"rollouts": []}, "rollouts: "),
            ({"rollouts": {}}, "rollouts: "),
            ({"rollouts": [ROLLOUT], "x": 1}, "'x': unknown key"),
            ({"rollouts": [ROLLOUT, {"messages": [1]}]}, "rollouts.1.messages.0: "),
            ({"rollouts": [ROLLOUT, 5]}, "rollouts.1.: "),
        ]
        for body, start in batches:
            found = await refusal(asker, body, "exact/score_batch")
            assert found[0] == 422 and found[1].startswith(start), found

    async def test_invalid_json_names_the_field(self, asker: RawClient) -> None:
        cases = [
            (b'{"messages": [], "sample": {"a": [1, NaN]}}', "sample.a.1: NaN is not JSON"),
            (b'{"messages": [], "ground_truth": -Infinity}', "ground_truth: -Infinity is not JSON"),
            (
                b'{"messages": [], "environment_return": 1e999}',
                "environment_return: 1e999 is out of the range of floats",
            ),
            (b'{"messages": [], "sample": {"a": 1, "b": 2, "a": 3}}', "sample: the key 'a' occurs twice"),
            (b'{"messages": [], "messages": []}', "(top level): the key 'messages' occurs twice"),
            (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "messages.0.content: a lone surrogate"),
            (rb'{"messages": [], "sample": {"\uDfff": 1}}', "sample, a key: a lone surrogate"),
            (b'{"messages": []', "Expecting"),
            (b"\xff\xfe{}", "the body is not valid UTF-8 at byte 0"),
            (b"", "Expecting value"),
            (b'{"messages": [], "ground_truth": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
            (
                b'{"messages": [], "ground_truth": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
                "the body is nested too deeply",
            ),
        ]
        for body, start in cases:
            found = await refusal(asker, body)
            assert found[0] == 400 and found[1].startswith(start), found
        pair = rb'{"messages": [{"role": "assistant", "content": "\ud83d\ude00"}], "ground_truth": "\ud83d\ude00"}'
        assert (await asker.score("exact", pair)).json()["score"] == 1.0

    async def test_deeply_nested_value_affects_only_its_rollout(self, asker: RawClient) -> None:
        deep = b'{"messages": [], "ground_truth": ' + b"[" * 700 + b"]" * 700 + b"}"
        answer = await asker.score("exact", deep)
        assert answer.status == 200 and answer.json()["score"] is None
        wrong = b'{"messages": ' + b"[" * 700 + b"]" * 700 + b"}"
        assert (await asker.score("exact", wrong)).status == 422

    async def test_unknown_paths_and_methods_are_rejected(self, asker: RawClient) -> None:
        for path in ("/", "/v1", "/v1/rewards/", "/v1/rewards/exact/", "/v1/rewards/nosuch", "/v1/rewards/exact/x"):
            assert (await asker.get(path)).status == 404, path
        assert "this server has exact, longest, broken" in (await asker.get("/v1/rewards/nosuch")).message
        for method, path, allowed in (
            ("POST", "/health", "GET, HEAD"),
            ("GET", "/v1/rewards/exact/score", "POST"),
            ("PUT", "/v1/rewards/exact", "GET, HEAD"),
        ):
            answer = await asker.get(path, method=method)
            assert (answer.status, answer.headers["allow"]) == (405, allowed)
        head = await asker.get("/v1/rewards", method="HEAD")
        assert (head.status, head.body) == (200, b"")

    async def test_malformed_http_is_logged_in_a_single_line(
        self, asker: RawClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "reward_kit")
        garbage = [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n"]
        for sent in (*garbage, b"GET / HTTP/1.1\r\n" + b"x" * 10_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", asker.port)
            writer.write(sent + b"\r\n\r\n")
            assert (await reader.read()).startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
            writer.close()
        assert {(record.levelname, record.message, record.exc_info) for record in caplog.records} == {
            ("INFO", "invalid HTTP", None)
        }
        assert (await asker.score("exact")).json()["score"] == 1.0

    async def test_body_that_is_not_plain_json_is_rejected(self, asker: RawClient) -> None:
        path = "/v1/rewards/exact/score"
        for headers in (
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/json; charset=utf-16"},
            {"Content-Encoding": "gzip"},
        ):
            assert (await asker.post(path, ROLLOUT, **headers)).status == 415
        assert (await asker.post(path, ROLLOUT, **{"Content-Type": "application/json; charset=UTF-8"})).status == 200


class TestLimits:
    async def test_large_body_is_rejected_before_and_while_reading(self) -> None:
        async with server(exact, max_body_mb=0.01, body_timeout_s=5) as asker:
            path, kind = "/v1/rewards/exact/score", {"Content-Type": "application/json"}
            reader, writer = await asker.open("POST", path, **kind, **{"Content-Length": str(10**12)})
            answer = await asker.answer(reader, writer)
            assert (answer.status, answer.json()["error"]["code"]) == (413, "too_large")
            reader, writer = await asker.open("POST", path, **kind, **{"Transfer-Encoding": "chunked"})
            writer.write((b"1000\r\n" + b" " * 4096 + b"\r\n") * 3)
            answer = await asker.answer(reader, writer)
            assert answer.status == 413
            inside = json.dumps({**ROLLOUT, "sample": {"x": "y" * 9_000}}).encode()
            assert (await asker.score("exact", inside)).status == 200

    async def test_expect_100_continue_is_answered_at_once(self) -> None:
        async with server(exact, max_body_mb=0.01) as asker:
            path, kind = "/v1/rewards/exact/score", {"Content-Type": "application/json", "Expect": "100-continue"}
            body = json.dumps(ROLLOUT).encode()
            reader, writer = await asker.open("POST", path, **kind, **{"Content-Length": str(len(body))})
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 Continue")
            writer.write(body)
            assert (await asker.answer(reader, writer)).json()["score"] == 1.0
            for key, status in ((KEY, b"413"), (None, b"401")):
                reader, writer = await asker.open("POST", path, key, **kind, **{"Content-Length": "99999"})
                assert (await reader.readline()).split()[1] == status
                writer.close()

    async def test_slow_heads_and_bodies_time_out(self) -> None:
        async with server(exact, body_timeout_s=0.1, head_timeout_s=0.1) as asker:
            reader, writer = await asker.open(
                "POST", "/v1/rewards/exact/score", **{"Content-Type": "application/json", "Content-Length": "100"}
            )
            writer.write(b"{")
            answer = await asker.answer(reader, writer)
            assert (answer.status, answer.json()["error"]["code"]) == (408, "too_slow")
            for begin in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "):
                reader, writer = await asyncio.open_connection("127.0.0.1", asker.port)
                writer.write(begin)
                assert await reader.read() == b""
                writer.close()
            assert (await asker.get("/health")).status == 200

    async def test_excess_connections_get_a_retry_after(self) -> None:
        async with server(exact, max_connections=2) as asker:
            held = [await asyncio.open_connection("127.0.0.1", asker.port) for _ in range(2)]
            reader, writer = await asyncio.open_connection("127.0.0.1", asker.port)
            response = await reader.read()
            assert response.startswith(b"HTTP/1.1 503") and b"Retry-After: 1" in response
            for _, one in (*held, (None, writer)):
                one.close()

    async def test_excess_rollouts_get_a_retry_after(self) -> None:
        gate = Gate()
        async with server(gate.reward, max_pending=3, max_batch=3, max_concurrency=1) as asker:
            path, rollout = "/v1/rewards/gated/score_batch", {"messages": []}
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(asker.post, path, {"rollouts": [rollout] * 2})
                await gate.until(1)
                for body in ({"rollouts": [rollout] * 2}, {"rollouts": [rollout] * 3}):
                    answer = await asker.post(path, body)
                    assert (answer.status, answer.json()["error"]["code"]) == (429, "too_many")
                    assert int(answer.headers["retry-after"]) >= 1
                gate.opened.set()
            answer = await asker.post(path, {"rollouts": [rollout] * 3})
            assert [one["score"] for one in answer.json()["scores"]] == [1.0] * 3
            assert (await refusal(asker, {"rollouts": [rollout] * 4}, "gated/score_batch"))[0] == 422

    async def test_held_bytes_are_limited_across_requests(self) -> None:
        gate = Gate()
        async with server(gate.reward, max_held_mb=0.02, max_body_mb=0.02) as asker:
            large = {"messages": [{"role": "user", "content": "x" * 15_000}]}
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(asker.score, "gated", large)
                await gate.until(1)
                answer = await asker.score("gated", large)
                assert answer.status == 429 and "max_held_mb" in answer.message
                gate.opened.set()
            assert (await asker.score("gated", large)).json()["score"] == 1.0

    async def test_conversation_with_too_many_messages_is_rejected(self) -> None:
        async with server(exact, max_messages=2) as asker:
            status, message = await refusal(asker, {"messages": [{"role": "user", "content": "x"}] * 3})
        assert status == 422 and message.startswith("messages: the rollout has 3 messages; the maximum is 2")

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"max_batch": 5000}, "max_batch must be at most max_pending, which is 4096"),
            ({"max_body_mb": 1000.0}, "max_body_mb must be at most max_held_mb, which is 512"),
            ({"max_concurrency": 0}, "max_concurrency: expected a whole number above 0"),
            ({"deadline_s": float("nan")}, "deadline_s: expected a number above 0"),
        ],
    )
    def test_invalid_limits_are_rejected(self, options: dict[str, float], told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            ServerOptions(**options)  # type: ignore[arg-type]

    async def test_unavailable_address_is_reported(self) -> None:
        async with server(exact) as asker:
            with pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {asker.port}: .*in use"):
                async with server(exact, port=asker.port):
                    pass
        with pytest.raises(ConfigError, match="cannot assign requested address"):
            async with server(exact, host="203.0.113.1"):
                pass

    async def test_thousand_concurrent_requests_are_answered_correctly(self) -> None:
        count, everybody = 1000, asyncio.Event()
        here = itertools.count(1)

        @reward_function
        async def meets(messages, sample):
            if next(here) == count:
                everybody.set()
            await everybody.wait()  # none is answered before all of them are being scored
            return {"score": sample["number"] / count, "reason": messages[-1].text}

        async with server(meets, max_concurrency=count) as asker:

            async def one(number: int) -> None:
                body = {"messages": [{"role": "assistant", "content": f"m{number}"}], "sample": {"number": number}}
                answers[number] = await asker.score("meets", {"rollout_id": f"r{number}", **body})

            answers: dict[int, object] = {}
            async with anyio.create_task_group() as tasks:
                for number in range(count):
                    tasks.start_soon(one, number)
        payload = {number: answer.json() for number, answer in answers.items()}  # type: ignore[attr-defined]
        assert len(payload) == count
        for number, found in payload.items():
            assert (found["rollout_id"], found["score"]) == (f"r{number}", number / count)
            assert found["result"]["reason"] == f"m{number}"


class TestShutdown:
    async def test_shutdown_answers_requests_in_flight_and_accepts_no_new_requests(self) -> None:
        gate = Gate()
        answers = []

        async def ask(asker: RawClient) -> None:
            answers.append(await asker.score("gated", {"messages": []}))

        async with anyio.create_task_group() as tasks, server(gate.reward) as asker:
            tasks.start_soon(ask, asker)
            await gate.until(1)
            reader, writer = await asyncio.open_connection("127.0.0.1", asker.port)  # open, and not yet used
            await asker.get("/health")

            async def later() -> None:
                with pytest.raises(OSError):
                    while True:
                        await asker.get("/health")
                writer.write(f"GET /v1/rewards HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
                response = (await reader.readuntil(b"\r\n\r\n")).lower()
                assert response.startswith(b"http/1.1 503") and b"retry-after: 1" in response and b"close" in response
                writer.close()
                gate.opened.set()

            tasks.start_soon(later)
        assert [answer.json()["score"] for answer in answers] == [1.0]

    async def test_answer_is_sent_completely_to_a_slow_reader(self) -> None:
        answered = asyncio.Event()

        @reward_function
        async def talks(messages):
            answered.set()
            return {"score": 1.0, "reason": "x" * 20_000_000}

        def read_on(writer: asyncio.StreamWriter) -> None:
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            resumed.append(True)

        resumed: list[bool] = []
        body = b'{"messages": []}'
        async with server(talks) as asker:
            head = {"Content-Type": "application/json", "Content-Length": str(len(body))}
            reader, writer = await asker.open("POST", "/v1/rewards/talks/score", **head)
            writer.transport.pause_reading()
            writer.write(body)
            await answered.wait()
            late = asyncio.create_task(asker.answer(reader, writer))
            asyncio.get_running_loop().call_later(0.5, read_on, writer)
        assert resumed == [True]  # until then it was waited for
        assert len((await late).json()["result"]["reason"]) == 20_000_000

    @pytest.mark.parametrize("is_hurried", [False, True])
    async def test_calls_exceeding_the_shutdown_timeout_are_cancelled(
        self, is_hurried: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        gate = Gate()
        named, options = [NamedReward("gated", reward_spec(gate.reward))], ServerOptions(shutdown_timeout_s=0.05)
        async with anyio.create_task_group() as tasks:

            async def ask(asker: RawClient) -> None:
                reader, writer = await asker.open(
                    "POST", "/v1/rewards/gated/score", **{"Content-Type": "application/json", "Content-Length": "16"}
                )
                writer.write(b'{"messages": []}')
                assert await reader.read() == b""
                writer.close()

            async with serving(named, Keys([KEY]), options) as running:
                tasks.start_soon(ask, RawClient(running.address))
                await gate.until(1)
                if is_hurried:
                    running.stop()
        assert (gate.waiting, gate.cancelled) == (0, 1)
        why = "stopped before all requests" if is_hurried else "not all requests were answered within 0.05 s"
        assert why in caplog.text and caplog.text.count("all requests") == 1


async def test_openapi_document_describes_the_answers(asker: RawClient) -> None:
    document = (await asker.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0" and document["security"] == [{"key": []}]
    named = document["paths"]["/v1/rewards/{name}"]["parameters"][0]["schema"]["enum"]
    assert named == ["broken", "exact", "longest"]

    def check(path: str, method: str, status: int, value: object) -> None:
        schema = document["paths"][path][method]["responses"][str(status)]["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)

    check("/health", "get", 200, (await asker.get("/health")).json())
    check("/v1/rewards", "get", 200, (await asker.get("/v1/rewards")).json())
    check("/v1/rewards/{name}", "get", 200, (await asker.get("/v1/rewards/exact")).json())
    check("/v1/rewards/{name}", "get", 404, (await asker.get("/v1/rewards/nosuch")).json())
    for name, rollout, status in (("exact", ROLLOUT, 200), ("broken", ROLLOUT, 200), ("exact", {}, 422)):
        check("/v1/rewards/{name}/score", "post", status, (await asker.score(name, rollout)).json())
    batch = await asker.post("/v1/rewards/longest/score_batch", {"rollouts": [ROLLOUT]})
    check("/v1/rewards/{name}/score_batch", "post", 200, batch.json())


async def test_metrics_count_requests_rollouts_and_seconds(asker: RawClient) -> None:
    for name in ("exact", "exact", "broken"):
        await asker.score(name)
    await asker.post("/v1/rewards/longest/score_batch", {"rollouts": [ROLLOUT] * 3})
    answer = await asker.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = [line for line in answer.body.decode().splitlines() if not line.startswith("#")]
    found = {
        name.removeprefix("reward_kit_serve_"): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)
    }
    assert found['requests_total{route="score",status="200"}'] == 3
    assert found['rollouts_total{reward="exact",outcome="scored"}'] == 2
    assert found['rollouts_total{reward="broken",outcome="crash"}'] == 1
    assert found['rollouts_total{reward="longest",outcome="scored"}'] == 3
    assert found['call_seconds_count{reward="exact"}'] == found['call_seconds_bucket{reward="exact",le="+Inf"}'] == 2
    assert found['request_seconds_bucket{route="score",le="+Inf"}'] == 3
    assert found["connections"] == 1 and found["held_bytes"] == 0

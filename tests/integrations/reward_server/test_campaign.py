"""Test the reward server under attack: fuzzing against its OpenAPI document, and clients that never finish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.reward_server.running_server import KEY, ROLLOUT
from tests.integrations.reward_server.serve_process import Command, serve

PEER = Path(__file__).parents[3] / ".integrations" / "serve" / "bin"
EXAMPLES = 100
pytestmark = pytest.mark.campaign


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Command]:
    names = ("rewards.py:exact", "rewards.py:longest", "rewards.py:sees_everything")
    with serve(tmp_path, *names, "--body-timeout", "5", "--max-connections", "3000") as found:
        yield found


@pytest.mark.skipif(not PEER.exists(), reason="schemathesis is not installed; run `make integrations`")
class TestAgainstOpenAPI:
    def test_fuzzed_requests_get_answers_that_match_the_openapi_document(self, running: Command) -> None:
        done = subprocess.run(
            [
                *(str(PEER / "schemathesis"), "run", f"{running.asker.address}/openapi.json", "--checks", "all"),
                *("--header", f"Authorization: Bearer {KEY}", "--max-examples", str(EXAMPLES), "--seed", "7"),
                *("--no-color", "--report", "json", "--report-json-path", "report.json"),
            ],
            cwd=running.said.parent,
            capture_output=True,
            text=True,
            timeout=1500,
        )
        print(done.stdout[-1500:])
        assert done.returncode == 0, done.stdout[-6000:]
        assert "No issues found" in done.stdout
        figures = asyncio.run(running.asker.get("/metrics")).body.decode()
        assert 'status="5' not in figures and 'route="score",status="200"' in figures
        assert "Traceback" not in running.said.read_text()

    def test_prometheus_parses_the_metrics(self, running: Command, tmp_path: Path) -> None:
        async def figures() -> bytes:
            await running.asker.score("exact")
            await running.asker.score("exact", {})
            return (await running.asker.get("/metrics")).body

        code = (
            "import json, sys\n"
            "from prometheus_client.parser import text_string_to_metric_families as read\n"
            "print(json.dumps([[f.name, f.type, len(f.samples)] for f in read(sys.stdin.read())]))\n"
        )
        done = subprocess.run([PEER / "python", "-c", code], input=asyncio.run(figures()), capture_output=True)
        families = {name: (kind, count) for name, kind, count in json.loads(done.stdout)}
        assert families["reward_kit_serve_requests"] == ("counter", 2)
        assert families["reward_kit_serve_call_seconds"][0] == "histogram"
        assert families["reward_kit_serve_pending"] == ("gauge", 3)


async def test_unfinished_requests_do_not_block_other_clients(running: Command) -> None:
    asker, path = running.asker, "/v1/rewards/exact/score"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    begins = [
        b"",
        b"GET /health HTTP/1.1\r\nX-A: ",
        head.encode(),
        f"{head}Content-Length: 16000000\r\n\r\n".encode() + b" " * 100,
        f"{head}Transfer-Encoding: chunked\r\n\r\n5\r\n".encode(),
    ]
    ended = 0

    async def trickle(number: int) -> None:
        nonlocal ended
        reader, writer = await asyncio.open_connection("127.0.0.1", asker.port)
        writer.write(begins[number % len(begins)])
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b" " if number % len(begins) else b"")
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1000), 0.5)
        ended += 1
        writer.close()

    slow = [asyncio.create_task(trickle(number)) for number in range(1000)]
    answers = [await asker.score("exact", ROLLOUT) for _ in range(300)]
    assert {answer.json()["score"] for answer in answers} == {1.0}
    await asyncio.wait_for(asyncio.gather(*slow), 120)
    assert ended == 1000
    figures = (await asker.get("/metrics")).body.decode()
    assert "reward_kit_serve_connections 1\n" in figures and "reward_kit_serve_held_bytes 0\n" in figures


async def test_a_thousand_requests_in_flight_to_a_server_in_another_process(running: Command) -> None:
    asker, count = running.asker, 1000

    async def one(number: int) -> bool:
        answer = await asker.score("exact", {**ROLLOUT, "rollout_id": f"r{number}", "ground_truth": str(number % 84)})
        payload = answer.json()
        return (payload["rollout_id"], payload["score"]) == (f"r{number}", float(number % 84 == 42))

    assert all(await asyncio.gather(*map(one, range(count))))
    figures = (await asker.get("/metrics")).body.decode()
    assert f'reward_kit_serve_rollouts_total{{reward="exact",outcome="scored"}} {count}\n' in figures

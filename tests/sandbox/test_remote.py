"""Calls elsewhere, over pipes to a real server: the same as here, and whatever becomes of the other side, no more."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from reward_kit.errors import ConfigError
from reward_kit.processes import child_environment
from reward_kit.sandbox import Limits, Program, RemoteSandbox, Sandbox, link, remote, wire
from tests.sandbox.behind_walls import AVAILABLE, QUICK, plain, run
from tests.sandbox.hostile_campaign import _run as run_case
from tests.sandbox.hostile_case import problems_of, read_cases
from tests.sandbox.places import SERVE, Pipe

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not any(found.is_available for name, found in AVAILABLE.items() if name != "process"),
        reason="nothing confines here",
    ),
]

CASES = Path(__file__).parent / "cases"
UNSLOW = [
    case for case in read_cases(CASES) if case.name.startswith(("forge_", "result_", "state_", "honest_"))
    and not case.name.startswith(("forge_by_drops", "forge_endless_frame"))
]  # fmt: skip
MEASURED = {"wall_s": 0.0, "cpu_s": 0.0, "peak_memory_mb": 0.0, "exit": None}
BODIES = [
    "return x",
    "print('out'); print('err', file=sys.stderr)\nreturn [1, 1.5, 10 ** 900, 'é\\x00\\U0001f600', None, {'a': ()}]",
    "a = []\nfor _ in range(97): a = [a]\nreturn a",
    "a = []\nfor _ in range(120): a = [a]\nreturn a",
    "print('x' * 3_000_000); os.write(2, bytes(range(256)) * 64); return 1",
    "return x['no']",
    "return float('nan')",
    "return '\\ud800'",
    "return 'x' * 5000",
    "return bytearray(1 << 30)",
    "os.write(3, b'RKF1 forged')",
    "os._exit(0)",
    "import socket; socket.socket()",
    "raise ValueError('\\ud800 half')",
    "import not_there_at_all",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def there():
    async with RemoteSandbox(Pipe(), slots=2) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here():
    async with Sandbox(slots=2) as opened:
        yield opened


@pytest.mark.parametrize("level", ["isolated", "warm"])
async def test_every_outcome_is_the_one_of_this_machine(here, there, level):
    assert there.strength == here.strength
    for body in BODIES:
        found = [replace(await run(sandbox, body, [1], level=level), **MEASURED) for sandbox in (here, there)]
        assert found[0] == found[1], body
    assert {outcome.wall_s > 0 for outcome in [await run(there, "return 1", level=level)]} == {True}


async def test_questions_are_put_one_at_a_time_there_too(here, there):
    program = plain("if x == 3: os._exit(0)\nprint(x); return 1 // x")
    for inputs in ([1, 0, 2], [1, 3, 1, 1], []):
        asked = [await sandbox.ask(program, inputs, limits=QUICK) for sandbox in (here, there)]
        assert [replace(one, **MEASURED) for one in asked[0]] == [replace(one, **MEASURED) for one in asked[1]]


async def test_what_models_write_and_what_is_large_passes(here, there):
    half = Program("def solve(x):\n    return '\ud800'", "solve", form="plain")
    found = [replace(await sandbox.call(half, None), **MEASURED) for sandbox in (here, there)]
    assert found[0] == found[1]
    outcome = await run(there, "return [len(x), x[0] == '\\ud800']", "\ud800" + "a" * 3_000_000)
    assert outcome.value == [3_000_001, True]
    outcome = await run(there, "return 'é' * 1_000_000", limits=Limits(result_kb=8192))
    assert outcome.value == "é" * 1_000_000


async def test_a_reward_gets_its_arguments_by_name(there):
    program = Program("def evaluate(messages, **rest): return [messages, rest]")
    outcome = await there.call(program, {"messages": [], "a": 1})
    assert outcome.value == [[], {"a": 1}]
    with pytest.raises(ConfigError, match="by name"):
        await there.call(Program("def evaluate(): pass"), [1])
    with pytest.raises(ConfigError, match="JSON"):
        await run(there, "return 1", object())


async def test_many_calls_at_once_each_get_their_own_answer(there):
    outcomes = await asyncio.gather(
        *(run(there, "return x", number, level=("warm", "isolated")[number % 2]) for number in range(60))
    )
    assert [outcome.value for outcome in outcomes] == list(range(60))


async def test_warm_is_warm_there(there):
    program = Program("seen = []\ndef solve(x):\n    seen.append(x); return len(seen)", "solve", form="plain")
    assert [(await there.call(program, 1, level="warm")).value for _ in range(3)] == [1, 2, 3]
    assert [(await there.call(program, 1)).value for _ in range(2)] == [1, 1]


async def test_limits_hold_there(there):
    outcome = await run(there, "time.sleep(60)", limits=replace(QUICK, wall_s=0.2))
    assert (outcome.kind, outcome.failure.failure_class) == ("wall", "timeout")
    assert "0.2 s of wall time; raise limits.wall_s" in outcome.failure.message


async def test_paths_are_of_the_place_where_it_runs(there, tmp_path):
    with pytest.raises(ConfigError, match=r"^pipe:test: /not/there, which the program is to read, is not there"):
        await run(there, "return 1", read_paths=("/not/there",))
    assert (await run(there, "return 7")).value == 7


@pytest.mark.parametrize("case", UNSLOW, ids=[case.name for case in UNSLOW])
async def test_hostile_code_meets_the_same_walls(there, case):
    seen = await run_case(there, case, case.filled({}), "isolated")
    assert problems_of(case, seen, []) == []


async def test_a_cancelled_call_is_ended_there_and_its_slot_is_free():
    place = Pipe()
    async with RemoteSandbox(place, slots=1) as there:
        call = asyncio.create_task(run(there, "time.sleep(1000)", limits=Limits(wall_s=2000)))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await run(there, "return 7")).value == 7
    assert place.launches == 1


async def test_a_server_that_is_killed_fails_the_calls_under_way_and_is_started_again():
    place = Pipe()
    async with RemoteSandbox(place, slots=2) as there:
        await run(there, "return 1")
        calls = [asyncio.create_task(run(there, "time.sleep(1000)", limits=Limits(wall_s=2000))) for _ in range(2)]
        await asyncio.sleep(0.3)
        server = newest_server()
        below = descendants_of(server)
        assert len(below) >= 3
        os.kill(server, signal.SIGKILL)
        for outcome in await asyncio.gather(*calls):
            assert (outcome.kind, outcome.word, outcome.value) == ("connection", "crashed", None)
            assert outcome.failure.failure_class == "crash"
            assert "the connection to pipe:test was lost" in outcome.failure.message
            assert outcome.failure.message.endswith("the call may be made again")
        assert (await run(there, "return 7")).value == 7
        assert place.launches == 2
        await are_gone(below)


async def test_a_server_ends_with_its_input_and_leaves_nothing():
    pipe = subprocess.PIPE
    server = subprocess.Popen(SERVE, stdin=pipe, stdout=pipe, env=child_environment())  # noqa: ASYNC220
    try:
        program = wire.fields_of(plain("time.sleep(1000)"))
        order = {"id": 1, "do": "call", "program": program, "limits": {"wall_s": 2000.0}, "level": "isolated"}
        body = b'[{"args": [null], "kwargs": {}}]'
        server.stdin.write(wire.packed({"strength": "auto", "slots": 1}) + wire.packed(order, body))
        server.stdin.flush()
        await until(lambda: len(descendants_of(server.pid)) >= 3)
        below = descendants_of(server.pid)
        server.stdin.close()
        assert server.wait(10) == 0
        await are_gone(below)
    finally:
        server.kill()
        server.stdout.close()
        server.wait()


async def test_no_secret_is_handed_on(monkeypatch):
    monkeypatch.setenv("TEST_API_KEY", "canary-4711")
    async with RemoteSandbox(Pipe(), slots=1):
        assert "canary-4711" not in environment_of(newest_server())


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("write(b'Welcome to the machine!\\n')", "it wrote 'Welcome to the machine.*is no message of a sandbox"),
        ("write(b'hi')", "it wrote 'hi', which is no message"),
        ("sys.exit('reward-kit: not found')", "cannot be used: reward-kit: not found"),
        ("sys.exit(3)", "cannot be used: exit status 3"),
        ("", "it ended without a word|exit status 0"),
        ("time.sleep(60)", "it said nothing within 0.3 s"),
        ("greet(version='0.0.1')", "runs reward-kit 0.0.1 .*; install the same version on both sides"),
        ("greet(protocol=99)", "protocol 99"),
        ("send({'protocol': True})", "what is no greeting"),
        ("send(b'{\"protocol\": NaN}')", "what is no greeting: the result holds NaN"),
        ("send(b'[' * 60000)", "what is no greeting"),
        ("write(struct.pack('!4sII', b'RKS1', 1 << 31, 0))", "a message of 2,147,483,648 bytes where at most"),
        ("write(struct.pack('!4sII', b'RKS1', 100, 0))", "it ended in the middle of a message"),
    ],
)
async def test_a_place_that_cannot_be_used_is_told_at_once(monkeypatch, script, message):
    monkeypatch.setattr(link, "_GREETING_S", 0.3 if "sleep" in script else 20)
    monkeypatch.setattr(link, "_GRACE_S", 0.5)
    with pytest.raises(ConfigError, match=message):
        async with RemoteSandbox(Pipe(script)):
            pytest.fail("it opened")


async def test_a_place_without_walls_is_refused():
    script = "send({'protocol': 1, 'reward_kit': __import__('importlib.metadata').metadata.version('reward-kit'), "
    script += "'processors': 1})\ntake()\nsend({'strength': None, 'refusal': 'nothing confines'})\ntake() # greet("
    with pytest.raises(ConfigError, match="pipe:test: nothing confines"):
        async with RemoteSandbox(Pipe(script)):
            pytest.fail("it opened")


ANSWER = "greet()\nwhile True:\n  order, body = take()\n  "


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("write(b'garbage, and more than a header')", "it wrote 'garbage, and"),
        ("send({'id': 99})", "it answered what it was not asked"),
        ("send({'id': 1, 'outcomes': [FINE], 'extra': 1}, b'[1]')", "what is no answer"),
        ("send({'id': 1, 'outcomes': [FINE, FINE]}, b'[1, 1]')", "it gave 2 outcomes to 1 requests"),
        ("send({'id': 1, 'outcomes': [FINE]}, b'[1, 1]')", "it gave 1 outcomes to 1 requests"),
        ("send({'id': 1, 'outcomes': [FINE]}, b'{}')", "it gave 1 outcomes to 1 requests"),
        ("send({'id': 1, 'outcomes': [FINE]}, b'[NaN]')", "holds NaN"),
        ("send({'id': 1, 'outcomes': [FINE]}, b'[' * 200 + b']' * 200)", "nested more than"),
        ("send({'id': 1, 'outcomes': [{**FINE, 'kind': 'wall'}]}, b'[1]')", "contradicts itself"),
        ("send({'id': 1, 'outcomes': [{**FINE, 'kind': 'fine'}]}, b'[1]')", "what is no answer"),
        ("send({'id': 1, 'outcomes': [{**FINE, 'wall_s': 'long'}]}, b'[1]')", "what is no answer"),
        ("send({'id': 1, 'outcomes': [FINE]}, b' ' * (1 << 20) + b'[1]')", "where at most"),
        ("sys.exit('out of memory')", "out of memory"),
        ("time.sleep(60)", "no answer came within 0.6 s"),
    ],
)
async def test_an_answer_that_cannot_be_loses_the_connection_and_no_more(monkeypatch, answer, message):
    monkeypatch.setattr(remote, "_SLACK_S", 0.3 if "sleep" in answer else 20)
    monkeypatch.setattr(link, "_GRACE_S", 0.5)
    async with RemoteSandbox(Pipe(ANSWER + answer), slots=1) as there:
        for _ in range(1 if "sleep" in answer else 2):
            outcome = await run(there, "return 1", limits=replace(QUICK, wall_s=0.3))
            assert outcome.kind == "connection", outcome
            assert message in outcome.failure.message


async def test_a_place_that_reads_nothing_does_not_hold_the_host(monkeypatch):
    monkeypatch.setattr(remote, "_SLACK_S", 0.3)
    monkeypatch.setattr(link, "_GRACE_S", 0.5)
    async with RemoteSandbox(Pipe("greet()\ntime.sleep(60)"), slots=1) as there:
        outcome = await run(there, "return 1", "a" * 5_000_000, limits=replace(QUICK, wall_s=0.3))
        assert "no answer came" in outcome.failure.message


async def test_a_place_that_is_gone_fails_each_call_until_it_is_back(tmp_path):
    script = f"import os\nif os.path.exists({str(tmp_path / 'gone')!r}): sys.exit('gone')\n"
    script += ANSWER + "send({'id': order['id'], 'outcomes': [FINE]}, b'[5]')\n  sys.exit()"
    async with RemoteSandbox(Pipe(script), slots=4) as there:
        assert (await run(there, "return 1")).value == 5
        (tmp_path / "gone").touch()
        outcomes = await asyncio.gather(*(run(there, "return 1") for _ in range(3)))
        assert {one.kind for one in outcomes} == {"connection"}
        assert "pipe:test cannot be used: gone" in (await run(there, "return 1")).failure.message
        (tmp_path / "gone").unlink()
        assert (await run(there, "return 1")).value == 5


async def test_it_says_so_where_it_is_not_open():
    there = RemoteSandbox(Pipe())
    with pytest.raises(ConfigError, match="async with"):
        _ = there.strength
    with pytest.raises(ConfigError, match="async with"):
        await run(there, "return 1")
    with pytest.raises(ConfigError, match="slots must be at least 1"):
        RemoteSandbox(Pipe(), slots=0)
    with pytest.raises(ConfigError, match="confines nothing there"):
        RemoteSandbox(Pipe(), strength="container")


async def test_a_person_who_starts_the_server_is_told():
    terminal, end = os.openpty()
    try:
        done = await asyncio.to_thread(subprocess.run, SERVE, stdin=end, capture_output=True, text=True, timeout=30)
    finally:
        os.close(terminal)
        os.close(end)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is started by the other side of a back end" in done.stderr


async def test_something_else_on_the_other_side_is_told():
    text = b"GET / HTTP/1.1\r\n\r\n"
    done = await asyncio.to_thread(subprocess.run, SERVE, input=text, capture_output=True, timeout=30)
    assert done.returncode == 2
    assert b"it wrote 'GET / HTTP/1.1" in done.stderr


def newest_server() -> int:
    ours = [pid for pid, parent in parents().items() if parent == os.getpid()]
    return max(pid for pid in ours if "sandbox-serve" in command_of(pid))


def descendants_of(pid: int) -> set[int]:
    found = {pid}
    for _ in range(8):
        found |= {child for child, parent in parents().items() if parent in found}
    return found - {pid}


def parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue  # it has ended
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def environment_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()


async def are_gone(pids: set[int]) -> None:
    await until(lambda: not pids & parents().keys())


async def until(holds) -> None:
    async with asyncio.timeout(15):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

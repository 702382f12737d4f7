"""Confined code in real containers of Docker and Podman, and on a machine that is reached by a real SSH server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.reward_agent.levels import SandboxChoice, load_reward, scorer_of
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.sandbox import Limits, RemoteSandbox, sandbox_at
from reward_kit.sandbox.back_ends import Docker
from tests.integrations.engines import IMAGE, Missing, containers, docker, podman, ssh_server
from tests.integrations.own_image import write_image
from tests.sandbox.behind_walls import plain, run
from tests.sandbox.hostile_campaign import _run as run_case
from tests.sandbox.hostile_case import problems_of, read_cases

pytestmark = pytest.mark.campaign

CASES = Path(__file__).parent.parent / "sandbox" / "cases"
KINDS = (
    "forge_",
    "result_",
    "state_",
    "honest_",
    "network_",
    "files_",
    "process_signals",
    "process_memory",
    "secrets_",
)
# Those that look for a canary of the campaign's have placeholders.
UNSLOW = [one for one in read_cases(CASES) if one.name.startswith(KINDS) and not re.search("@[A-Z]+@", one.source)]
ROOMY = Limits(wall_s=20, memory_mb=300)
REWARD = "def right(messages, ground_truth):\n    return {'score': float(messages[-1].text == ground_truth)}\n"
ESCAPES = """
found = []
for act in (
    lambda: os.listdir("/proc/1/fd"),
    lambda: open("/proc/1/mem", "rb"),
    lambda: open("/proc/1/environ", "rb").read(),
    lambda: open("/usr/local/bin/reward-kit", "a"),
    lambda: open("/written", "w"),
    lambda: os.setuid(0),
    lambda: __import__("socket").create_connection(("192.0.2.1", 80), 1),
):
    try:
        act()
        found.append("done")
    except OSError as error:
        found.append(type(error).__name__)
for number in (9, 15, 19):
    os.kill(1, number)
return found, os.getuid(), sorted(name for name in os.listdir("/sys/class/net"))
"""
CLIENT = """
import asyncio, sys
from reward_kit.sandbox import Limits, Program, sandbox_at
async def main():
    async with sandbox_at(sys.argv[1], slots=1) as there:
        program = Program("import time\\ndef solve(x):\\n    time.sleep(x)", "solve", form="plain")
        await there.call(program, 0)
        print("ready", flush=True)
        await there.call(program, 1000, limits=Limits(wall_s=2000))
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("image") / "image.tar"
    write_image(target)
    return target


@pytest.fixture(scope="module", params=[docker, podman], ids=["docker", "podman"])
def engine(request, image, tmp_path_factory):
    """The variables of an engine; they are those of this process while its tests run."""
    # A short path: that of a socket may have a hundred bytes.
    try:
        with request.param(tmp_path_factory.mktemp("e"), image) as variables, pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            yield variables
            assert containers(variables) == []
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    """The back end of a machine that is reached by SSH, which is this one."""
    try:
        with ssh_server(tmp_path_factory.mktemp("s")) as (host, variables), pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            yield f"ssh:{host}:{Path(sys.executable).parent}/reward-kit"
    except Missing as missing:
        pytest.skip(str(missing))


async def test_the_container_confines_by_itself_or_each_call_has_its_own(engine):
    async with sandbox_at(f"docker:{IMAGE}", slots=2) as there:
        assert there.strength in ("namespaces", "landlock", "container")
        outcomes = await asyncio.gather(*(run(there, "return x", number, ROOMY) for number in range(4)))
        assert [one.value for one in outcomes] == [0, 1, 2, 3]
        for level in ("isolated", "warm", "warm"):
            assert (await run(there, "import socket; socket.socket()", level=level)).kind == "denied"
            assert (await run(there, "return x", 7, ROOMY, level)).value == 7
        print(f"\nwalls inside: {there.strength}")


async def test_hostile_code_finds_nothing_there(engine):
    async with sandbox_at(f"docker:{IMAGE}", slots=2) as there:
        for case in UNSLOW:
            seen = await run_case(there, case, case.filled({}), "isolated")
            assert [problem for problem in problems_of(case, seen, []) if not problem.startswith("slow")] == [], (
                case.name
            )


async def test_the_container_alone_holds_one_call_and_is_gone(engine):
    async with RemoteSandbox(Docker(IMAGE), strength="container", slots=2) as there:
        assert there.strength == "container"
        outcome = await run(there, ESCAPES, limits=ROOMY)
        found, user, networks = outcome.value
        assert "done" not in found, found
        assert (user, networks, outcome.strength) == (65534, ["lo"], "container")
        first, second = await asyncio.gather(
            *(run(there, "open('/tmp/mark', 'x').close(); return 1", limits=ROOMY) for _ in range(2))
        )
        assert (first.value, second.value) == (1, 1)
        late = await run(there, "while True: time.sleep(1)", limits=Limits(wall_s=1))
        assert late.kind == "wall"
        assert [one.value for one in await there.ask(plain("return x * 2"), [1, 2], limits=ROOMY)] == [2, 4]
    assert containers(engine) == []


async def test_paths_are_shown_read_only_where_they_are_here(engine, tmp_path):
    os.chmod(tmp_path, 0o755)  # noqa: PTH101
    (tmp_path / "data").write_text("shown")
    shown = str(tmp_path / "data")
    body = f"try:\n    open({shown!r}, 'a')\n    return 'written'\nexcept OSError:\n    return open({shown!r}).read()"
    for strength in ("auto", "container"):
        async with RemoteSandbox(Docker(IMAGE), strength=strength, slots=1) as there:
            outcome = await run(there, body, limits=ROOMY, read_paths=(str(tmp_path),))
            assert outcome.value == "shown"
            assert (await run(there, f"return open({shown!r}).read()", limits=ROOMY)).value is None


async def test_a_reward_runs_in_it(engine, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    choice = SandboxChoice(level="isolated", back_end=f"docker:{IMAGE}")
    loaded = await asyncio.to_thread(load_reward, "reward.py:right", tmp_path, choice)
    messages = (Message(role="user", content="2 + 2?"), Message(role="assistant", content="4"))
    async with scorer_of(loaded.reward) as scorer:
        scored = [await scorer.score(ScoringRequest("r1", messages, truth, [1])) for truth in ("4", "5")]
    assert [one.result.score for one in scored] == [1.0, 0.0]
    assert scored[0].sandbox["back_end"] == f"docker:{IMAGE}"


async def test_an_image_that_is_not_there_is_told(engine):
    with pytest.raises(ConfigError, match=r"docker:localhost/nothing:1 cannot be used: .*pull localhost/nothing:1"):
        async with sandbox_at("docker:localhost/nothing:1"):
            pytest.fail("it opened")


def test_a_host_that_is_killed_leaves_no_container(engine):
    client = subprocess.Popen([sys.executable, "-c", CLIENT, f"docker:{IMAGE}"], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout.readline() == "ready\n"
        assert len(containers(engine)) >= 1
    finally:
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
        client.stdout.close()
    end = time.monotonic() + 60
    while containers(engine):
        assert time.monotonic() < end, containers(engine)
        time.sleep(0.2)


async def test_a_container_that_is_killed_fails_the_call_and_is_started_again(engine):
    async with sandbox_at(f"docker:{IMAGE}", slots=1) as there:
        assert (await run(there, "return 1", limits=ROOMY)).value == 1
        call = asyncio.create_task(run(there, "time.sleep(1000)", limits=Limits(wall_s=2000)))
        await asyncio.sleep(3)
        words = engine["REWARD_KIT_CONTAINER_ENGINE"].split()
        await asyncio.to_thread(subprocess.run, [*words, "kill", *containers(engine)], check=True, capture_output=True)
        outcome = await call
        assert (outcome.kind, outcome.failure.failure_class) == ("connection", "crash")
        assert (await run(there, "return 2", limits=ROOMY)).value == 2


class TestSsh:
    async def test_calls_on_another_machine(self, box, monkeypatch):
        monkeypatch.setenv("TEST_API_KEY", "canary-4711")
        async with sandbox_at(box, slots=2) as there:
            assert there.strength in ("namespaces", "landlock")
            outcomes = await asyncio.gather(*(run(there, "return x", number, level="warm") for number in range(50)))
            assert [one.value for one in outcomes] == list(range(50))
            assert (await run(there, "return dict(os.environ).get('TEST_API_KEY')")).value is None

    async def test_hostile_code_finds_nothing_there(self, box):
        async with sandbox_at(box, slots=2) as there:
            for case in UNSLOW:
                seen = await run_case(there, case, case.filled({}), "isolated")
                assert problems_of(case, seen, []) == [], case.name

    async def test_a_connection_that_is_cut_fails_the_call_and_is_made_again(self, box):
        async with sandbox_at(box, slots=1) as there:
            assert (await run(there, "return 1")).value == 1
            call = asyncio.create_task(run(there, "time.sleep(1000)", limits=Limits(wall_s=2000)))
            await asyncio.sleep(0.5)
            (client,) = pids_of("ssh", "sandbox-serve")
            served = pids_of("python", "sandbox-serve")
            os.kill(client, signal.SIGKILL)
            outcome = await call
            assert (outcome.kind, outcome.failure.failure_class) == ("connection", "crash")
            assert (await run(there, "return 2")).value == 2
            end = time.monotonic() + 20
            while set(served) & set(pids_of("python", "sandbox-serve")):
                assert time.monotonic() < end, "the server there did not end with its connection"
                await asyncio.sleep(0.1)

    async def test_a_machine_without_reward_kit_and_one_that_refuses_are_told(self, box):
        with pytest.raises(ConfigError, match="ssh:box:/path/to/reward-kit"):
            async with sandbox_at("ssh:box:/not/there/reward-kit"):
                pytest.fail("it opened")
        with pytest.raises(ConfigError, match="`ssh -o BatchMode=yes nobody@box true` has to work"):
            async with sandbox_at("ssh:nobody@box"):
                pytest.fail("it opened")


def pids_of(name: str, word: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else [""]
        except OSError:
            continue  # it has ended
        if Path(words[0]).name.startswith(name) and any(word in one for one in words):
            found.append(int(entry.name))
    return found

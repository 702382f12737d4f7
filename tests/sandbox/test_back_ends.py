"""Which command reaches a back end, what it shows and hands over, and what is told where it cannot be used."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.sandbox import Limits, RemoteSandbox, Sandbox, sandbox_at
from reward_kit.sandbox.back_ends import Docker, Ssh, back_end_of
from tests.sandbox.behind_walls import AVAILABLE, QUICK, missing, plain, run
from tests.sandbox.places import NO_WALLS, write_engine, write_ssh

PROGRAM = f"{Path(sys.executable).parent}/reward-kit"
confines = pytest.mark.skipif(
    not any(found.is_available for name, found in AVAILABLE.items() if name != "process"),
    reason="nothing confines here",
)
limits_only = pytest.mark.skipif(missing("process") != "", reason=missing("process"))


@pytest.fixture
def engine(tmp_path, monkeypatch) -> Path:
    """A container engine that takes the same words and runs the server here; the file in which it notes its calls."""
    monkeypatch.setenv("REWARD_KIT_CONTAINER_ENGINE", write_engine(tmp_path))
    return tmp_path / "calls"


@pytest.fixture
def ssh(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("REWARD_KIT_SSH", write_ssh(tmp_path))
    return f"ssh:here:{PROGRAM}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("podman:x", "'podman:x' is no back end; one is docker:IMAGE, or ssh:HOST"),
        ("docker", "is no name of an image"),
        ("docker:", "is no name of an image"),
        ("docker:--privileged", "is no name of an image"),
        ("docker:a b", "is no name of an image"),
        ("ssh:", "is no host"),
        ("ssh:-oProxyCommand=touch /tmp/x", "is no host"),
        ("ssh:host;reboot", "is no host"),
        ("ssh:host:reward-kit", "is no host"),
        ("ssh:host:/bin/a;reboot", "is no host"),
    ],
)
def test_what_is_no_back_end_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        back_end_of(text)


def test_a_name_leads_to_its_place():
    assert isinstance(back_end_of("docker:registry.example:5000/a/b:1.0@sha256:0a"), Docker)
    assert back_end_of("ssh:me@gpu-1.example").launch().command[-2:] == ("me@gpu-1.example", "reward-kit sandbox-serve")
    assert back_end_of("ssh:gpu:/opt/x/reward-kit").launch().command[-2:] == ("gpu", "/opt/x/reward-kit sandbox-serve")
    assert isinstance(sandbox_at(None), Sandbox)
    assert isinstance(sandbox_at("ssh:gpu"), RemoteSandbox)


def test_a_container_has_nothing_that_a_sandbox_does_not_need(engine, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    launch = Docker("image:1").launch([str(data)])
    wanted = {"--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--rm"}
    wanted |= {"--user=65534:65534", "--pull=never", "--log-driver=none", f"--mount=type=bind,source={data},target={data},readonly"}  # noqa: E501 # fmt: skip
    assert wanted <= set(launch.command)
    assert launch.command[-3:] == ("--entrypoint=reward-kit", "image:1", "sandbox-serve")
    name = next(word for word in launch.command if word.startswith("--name=")).partition("=")[2]
    assert launch.end[1:] == ("rm", "--force", name)
    alone = Docker("image:1").launch(limits=Limits(memory_mb=100, disk_mb=20, processes=3))
    assert {"--memory=932m", "--pids-limit=131"} <= set(alone.command)
    assert "--tmpfs=/tmp:rw,nosuid,nodev,mode=1777,size=84m" in alone.command


def test_a_path_that_a_container_cannot_show_is_refused(engine, tmp_path):
    (tmp_path / "closed").touch(mode=0o600)
    (tmp_path / "a,b").touch(mode=0o644)
    for name, message in [("closed", r"chmod o\+rX"), ("a,b", "its name has a comma"), ("none", "is not there")]:
        with pytest.raises(ConfigError, match=message):
            Docker("image").launch([str(tmp_path / name)])


def test_the_container_engine_is_found_or_missed_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("REWARD_KIT_CONTAINER_ENGINE", raising=False)
    with pytest.raises(ConfigError, match="neither docker nor podman is found"):
        Docker("image").launch()
    for name in ("podman", "docker"):
        (tmp_path / name).touch(mode=0o755)
        assert Docker("image").launch().command[0] == name
    monkeypatch.setenv("REWARD_KIT_CONTAINER_ENGINE", "podman --root /x")
    assert Docker("image").launch().command[:3] == ("podman", "--root", "/x")
    monkeypatch.setenv("REWARD_KIT_CONTAINER_ENGINE", "nerdctl")
    with pytest.raises(ConfigError, match="nerdctl, which REWARD_KIT_CONTAINER_ENGINE names, is not found"):
        Docker("image").launch()


@pytest.mark.parametrize(
    ("place", "output", "status", "hint"),
    [
        (Docker("a"), "docker: Error response from daemon: No such image: a:latest", 125, "pull a"),
        (Docker("a"), "Error: a: image not known", 125, "pull a"),
        (Docker("a"), "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", 125, "start the engine"),
        (Docker("a"), 'exec: "reward-kit": executable file not found in $PATH', 127, "a needs reward-kit on its path"),
        (Docker("a"), "something else", 1, ""),
        (Ssh("h"), "Permission denied (publickey).", 255, "`ssh -o BatchMode=yes h true` has to work by itself"),
        (Ssh("h"), "bash: reward-kit: command not found", 127, "ssh:h:/path/to/reward-kit"),
        (Ssh("h"), "something else", 1, ""),
    ],
)
def test_what_helps_is_said(engine, place, output, status, hint):
    assert (hint in place.hint(output, status)) if hint else place.hint(output, status) == ""


@confines
async def test_a_machine_by_ssh_is_used_as_it_is(ssh, tmp_path):
    async with sandbox_at(ssh, slots=1) as there:
        assert there.strength in ("namespaces", "landlock")
        outcome = await run(there, "return x + 1", 1)
    assert (outcome.value, outcome.strength) == (2, there.strength)


async def test_a_machine_by_ssh_that_cannot_be_reached_is_told(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text(
        "#!/bin/sh\necho 'ssh: connect to host here port 22: Connection refused' >&2\nexit 255\n"
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("REWARD_KIT_SSH", str(tmp_path / "ssh"))
    with pytest.raises(
        ConfigError, match=r"^ssh:here cannot be used: .*Connection refused; `ssh -o BatchMode=yes here"
    ):
        async with sandbox_at("ssh:here"):
            pytest.fail("it opened")


@limits_only
class TestAContainerForEachCall:
    """Where nothing can be confined inside a container, it is the wall itself."""

    async def test_calls_share_none(self, engine):
        async with sandbox_at("docker:image", slots=2) as there:
            assert there.strength == "container"
            outcomes = await asyncio.gather(*(run(there, "return x", number) for number in range(3)))
            assert [(one.value, one.strength) for one in outcomes] == [(number, "container") for number in range(3)]
            failed = await run(there, "os._exit(0)")
            assert (failed.kind, failed.strength) == ("no_result", "container")
        runs = [line for line in engine.read_text().splitlines() if line.startswith("run")]
        assert len(runs) == 2 + 4  # one is asked for its walls, one tried; each call has its own
        assert len(set(runs)) == len(runs)

    async def test_warm_calls_of_one_function_share_one(self, engine):
        async with sandbox_at("docker:image", slots=1) as there:
            before = len(engine.read_text().splitlines())
            for body in ("return 1", "return 2", "return 1"):
                assert (await run(there, body, level="warm")).value == int(body[-1])
            assert len(engine.read_text().splitlines()) == before + 2
            assert (await run(there, "return 1 // x", 0, level="warm")).kind == "exception"
            assert (await run(there, "return 1 // x", 1, level="warm")).value == 1
            runs = [line for line in engine.read_text().splitlines()[before:] if line.startswith("run")]
            assert len(runs) == 4

    async def test_questions_are_put_to_one(self, engine):
        async with sandbox_at("docker:image", slots=1, strength="auto") as there:
            before = len(engine.read_text().splitlines())
            outcomes = await there.ask(plain("return x * 2"), [1, 2], limits=QUICK)
            assert [one.value for one in outcomes] == [2, 4]
            assert len(engine.read_text().splitlines()) == before + 1

    async def test_one_that_does_not_end_is_removed_by_name(self, engine):
        async with sandbox_at("docker:image", slots=1) as there:
            call = asyncio.create_task(run(there, "time.sleep(1000)", limits=Limits(wall_s=2000)))
            async with asyncio.timeout(20):
                while engine.read_text().count("run") < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        *_, run_of_call = [line for line in engine.read_text().splitlines() if line.startswith("run")]
        assert "--memory" in run_of_call

    async def test_a_machine_by_ssh_is_refused_there(self, tmp_path, monkeypatch):
        monkeypatch.setenv("REWARD_KIT_SSH", write_ssh(tmp_path))
        (tmp_path / "no-walls").write_text(f"#!{sys.executable}\n{NO_WALLS}")
        (tmp_path / "no-walls").chmod(0o755)
        with pytest.raises(ConfigError, match="cannot confine code"):
            async with sandbox_at(f"ssh:here:{tmp_path}/no-walls"):
                pytest.fail("it opened")

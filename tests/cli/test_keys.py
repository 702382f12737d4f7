"""Test that keys are sent only to their own origins, whatever task files, `.env` files and runs name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.chat_server import ChatServer, Received, answer, status
from tests.cli.project import Project

KEY = "sk-of-the-user-0123456789"
OTHER = "a-value-under-an-innocent-name"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "work").mkdir()
    return Project(tmp_path / "work", rows=1, num_rollouts_per_sample=1)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ChatServer]:
    async with ChatServer(lambda _: answer("done")) as running:
        yield running


def acting(server: ChatServer, **options: Any) -> dict[str, Any]:
    return {"type": "openai", "model": "m", "base_url": server.base_url, **options}


def origin(server: ChatServer) -> str:
    return server.base_url.removesuffix("/v1")


def bearers(requests: list[Received]) -> set[str | None]:
    return {request.headers.get("Authorization") for request in requests}


async def run(project: Project, *arguments: str, **variables: str) -> Any:
    return await asyncio.to_thread(project.call, "run", *(arguments or ("task.yaml",)), **variables)


class TestDefaultKey:
    async def test_base_url_of_the_task_file_gets_no_key(self, project: Project, server: ChatServer) -> None:
        project.write_task(policy=acting(server))
        done = await run(project, OPENAI_API_KEY=KEY)
        assert done.returncode == 0, done.stderr
        assert bearers(server.requests) == {None}

    async def test_base_url_of_the_user_block_gets_no_key(self, project: Project, server: ChatServer) -> None:
        actions = [{"type": "text", "content": "hello"}]
        project.write_task(
            policy={"type": "scripted", "actions": actions},
            user=acting(server, instructions="Say done."),
            on_text=None,
            max_episode_steps=2,
        )
        done = await run(project, OPENAI_API_KEY=KEY)
        assert server.requests, done.stderr
        assert bearers(server.requests) == {None}

    async def test_base_url_of_a_judge_gets_no_key(self, project: Project, server: ChatServer) -> None:
        project.write_task(
            reward_function_path="reward_kit.rewards:llm_judge",
            reward_options={"model": "m", "base_url": server.base_url, "rubric": {"good": "Is it good?"}},
        )
        await run(project, OPENAI_API_KEY=KEY)
        assert server.requests and bearers(server.requests) == {None}

    @pytest.mark.parametrize("way", ["--base-url", "-T", "OPENAI_BASE_URL", "REWARD_KIT_KEY_ORIGINS"])
    async def test_base_url_of_the_user_gets_the_key(self, project: Project, server: ChatServer, way: str) -> None:
        project.write_task(policy=acting(server))
        arguments, variables = ["task.yaml"], {"OPENAI_API_KEY": KEY}
        if way == "--base-url":
            arguments += ["--base-url", server.base_url]
        elif way == "-T":
            arguments += ["-T", f"policy.base_url={server.base_url}"]
        else:
            variables[way] = server.base_url if way == "OPENAI_BASE_URL" else f"OPENAI_API_KEY={origin(server)}"
        done = await run(project, *arguments, **variables)
        assert done.returncode == 0, done.stderr
        assert bearers(server.requests) == {f"Bearer {KEY}"}

    async def test_rejection_explains_why_no_key_was_sent(self, project: Project) -> None:
        async with ChatServer(lambda _: status(401, text="who are you?")) as server:
            project.write_task(policy=acting(server))
            done = await run(project, OPENAI_API_KEY=KEY)
        assert done.returncode == 3
        assert "no key was sent: OPENAI_API_KEY was not sent, because it is not configured for" in done.stderr
        assert f'export REWARD_KIT_KEY_ORIGINS="OPENAI_API_KEY={origin(server)}"' in done.stderr

    async def test_api_key_in_the_task_file_is_sent(self, project: Project, server: ChatServer) -> None:
        project.write_task(policy=acting(server, api_key="of-the-file-itself"))
        await run(project, OPENAI_API_KEY=KEY)
        assert bearers(server.requests) == {"Bearer of-the-file-itself"}


class TestNamedVariable:
    @pytest.mark.parametrize("base_url", [None, "http://127.0.0.1:9/v1", "https://api.mistral.ai/v1"])
    async def test_api_key_env_is_rejected_unless_allowed(self, project: Project, base_url: str | None) -> None:
        policy = {"type": "openai", "model": "m", "base_url": base_url, "api_key_env": "AWS_SECRET_ACCESS_KEY"}
        project.write_task(policy={key: value for key, value in policy.items() if value})
        done = await run(project, AWS_SECRET_ACCESS_KEY=OTHER, MISTRAL_API_KEY=KEY)
        place = (base_url or "https://api.openai.com").removesuffix("/v1")
        written = (project.folder / "task.yaml").read_text().splitlines()
        line = 1 + next(n for n, text in enumerate(written) if "api_key_env" in text)
        assert done.returncode == 2 and not project.runs()
        assert (
            f"task.yaml:{line}: policy.api_key_env: AWS_SECRET_ACCESS_KEY is not configured for {place}" in done.stderr
        )
        assert f'export REWARD_KIT_KEY_ORIGINS="AWS_SECRET_ACCESS_KEY={place}"' in done.stderr
        assert OTHER not in done.stderr

    @pytest.mark.parametrize("block", ["user", "judge"])
    async def test_api_key_env_of_other_blocks_is_rejected_unless_allowed(
        self, project: Project, server: ChatServer, block: str
    ) -> None:
        if block == "user":
            project.write_task(user=acting(server, instructions="x", api_key_env="MY_VALUE"), on_text=None)
        else:
            project.write_task(
                reward_function_path="reward_kit.rewards:llm_judge",
                reward_options={
                    "model": "m",
                    "base_url": server.base_url,
                    "client": {"api_key_env": "MY_VALUE"},
                    "rubric": {"good": "Is it good?"},
                },
            )
        key = "user.api_key_env" if block == "user" else "reward_options.client.api_key_env"
        written = (project.folder / "task.yaml").read_text().splitlines()
        line = 1 + next(n for n, text in enumerate(written) if "api_key_env" in text)
        done = await run(project, MY_VALUE=OTHER)
        assert done.returncode == 2 and not server.requests
        assert f"task.yaml:{line}: {key}: MY_VALUE is not configured for {origin(server)}" in done.stderr

    async def test_allowed_variable_is_sent(self, project: Project, server: ChatServer) -> None:
        project.write_task(policy=acting(server, api_key_env="MY_VALUE"))
        listed = f"ELSE=https://else.example, MY_VALUE={origin(server)}"
        done = await run(project, MY_VALUE=OTHER, OPENAI_API_KEY=KEY, REWARD_KIT_KEY_ORIGINS=listed)
        assert done.returncode == 0, done.stderr
        assert bearers(server.requests) == {f"Bearer {OTHER}"}

    async def test_variable_allowed_for_another_origin_is_rejected(self, project: Project, server: ChatServer) -> None:
        project.write_task(policy=acting(server, api_key_env="MY_VALUE"))
        listed = "MY_VALUE=https://llm.example"
        done = await run(project, MY_VALUE=OTHER, REWARD_KIT_KEY_ORIGINS=listed)
        assert done.returncode == 2 and not server.requests
        assert f'export REWARD_KIT_KEY_ORIGINS="$REWARD_KIT_KEY_ORIGINS MY_VALUE={origin(server)}"' in done.stderr

    async def test_typed_base_url_gets_known_provider_keys_only(self, project: Project, server: ChatServer) -> None:
        arguments = ["task.yaml", "--base-url", server.base_url]
        project.write_task(policy={"type": "openai", "model": "m", "api_key_env": "MISTRAL_API_KEY"})
        assert (await run(project, *arguments, MISTRAL_API_KEY=KEY)).returncode == 0
        assert bearers(server.requests) == {f"Bearer {KEY}"}
        project.write_task(policy={"type": "openai", "model": "m", "api_key_env": "MY_VALUE"})
        done = await run(project, *arguments, MY_VALUE=OTHER)
        assert done.returncode == 2 and "MY_VALUE is not configured for" in done.stderr
        typed = await run(project, *arguments, "-T", "policy.api_key_env=MY_VALUE", MY_VALUE=OTHER)
        assert typed.returncode == 0 and f"Bearer {OTHER}" in bearers(server.requests)


class TestDotenv:
    async def test_base_url_of_dotenv_gets_no_key_of_the_shell(self, project: Project, server: ChatServer) -> None:
        (project.folder / ".env").write_text(f"OPENAI_BASE_URL={server.base_url}\n")
        project.write_task(policy={"type": "openai", "model": "m"})
        done = await run(project, OPENAI_API_KEY=KEY)
        assert done.returncode == 0, done.stderr
        assert bearers(server.requests) == {None}

    async def test_base_url_of_dotenv_gets_the_key_of_dotenv(self, project: Project, server: ChatServer) -> None:
        (project.folder / ".env").write_text(f"OPENAI_BASE_URL={server.base_url}\nOPENAI_API_KEY=of-the-dotenv\n")
        project.write_task(policy={"type": "openai", "model": "m"})
        await run(project, OPENAI_API_KEY=KEY)
        assert bearers(server.requests) == {"Bearer of-the-dotenv"}

    async def test_dotenv_cannot_allow_origins(self, project: Project, server: ChatServer) -> None:
        listed = f"MY_VALUE={origin(server)} OPENAI_API_KEY={origin(server)}"
        (project.folder / ".env").write_text(f'REWARD_KIT_KEY_ORIGINS="{listed}"\nOPENAI_BASE_URL={server.base_url}\n')
        project.write_task(policy=acting(server, api_key_env="MY_VALUE"))
        done = await run(project, MY_VALUE=OTHER)
        assert done.returncode == 2 and "MY_VALUE is not configured for" in done.stderr
        project.write_task(policy=acting(server))
        await run(project, OPENAI_API_KEY=KEY)
        assert bearers(server.requests) == {None}

    async def test_key_of_dotenv_is_not_sent_to_a_url_of_the_task_file(
        self, project: Project, server: ChatServer
    ) -> None:
        (project.folder / ".env").write_text(f"OPENAI_API_KEY={KEY}\n")
        project.write_task(policy=acting(server))
        await run(project)
        assert bearers(server.requests) == {None}


async def test_base_url_stored_in_a_run_gets_no_key(project: Project, server: ChatServer) -> None:
    """The `base_url` and overrides in an untrusted run folder get no key of the user."""
    failing = ChatServer(lambda _: status(400, text="not now"))
    async with failing:
        project.write_task(policy={"type": "openai", "model": "m"})
        await run(project, "task.yaml", "--base-url", failing.base_url)
    header = project.run_path() / "run.json"
    header.write_text(header.read_text().replace(failing.base_url, server.base_url))
    done = await run(project, "--resume", "--only-failed", OPENAI_API_KEY=KEY)
    assert done.returncode == 0, done.stderr
    assert server.requests and bearers(server.requests) == {None}


async def test_typed_base_url_is_remembered_for_resume(project: Project, server: ChatServer) -> None:
    """The printed resume command works without the endpoint."""
    project.write_task(policy={"type": "openai", "model": "m"})
    project.write_rows([{"id": f"q{n}", "number": n, "ground_truth": "done"} for n in range(4)])
    limits = ("-T", "run_limits.steps=1", "--max-concurrency", "1")
    await run(project, "task.yaml", "--base-url", server.base_url, *limits, OPENAI_API_KEY=KEY)
    before = len(server.requests)
    done = await run(project, "--resume", "-T", "run_limits.steps=100", OPENAI_API_KEY=KEY)
    assert done.returncode == 0, done.stderr
    assert len(server.requests) > before and bearers(server.requests) == {f"Bearer {KEY}"}


async def test_key_does_not_follow_a_redirect(project: Project, server: ChatServer) -> None:
    moved = status(307, {"Location": f"{server.base_url}/chat/completions"})
    async with ChatServer(lambda _: moved) as near:
        project.write_task(policy={"type": "openai", "model": "m"})
        await run(project, "task.yaml", "--base-url", near.base_url, OPENAI_API_KEY=KEY)
        assert bearers(near.requests) == {f"Bearer {KEY}"} and not server.requests


async def test_netrc_password_is_not_sent_with_trust_env(project: Project, server: ChatServer, tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login me password hunter2hunter2\n")
    netrc.chmod(0o600)
    project.write_task(policy=acting(server, trust_env=True))
    await run(project, NETRC=str(netrc))
    assert server.requests and bearers(server.requests) == {None}


async def test_key_of_any_name_is_in_no_file_of_the_run(project: Project) -> None:
    """The server echoes the key in an answer, in an error, and in an answer of the judge."""

    def echo(body: dict[str, Any]) -> Any:
        return answer(f"your key is {OTHER}") if "refuse" not in json.dumps(body) else status(400, text=f"no {OTHER}")

    async with ChatServer(echo) as server:
        project.write_rows(
            [
                {"id": "a", "number": f"{OTHER}", "ground_truth": "x"},
                {"id": "b", "number": "please refuse", "ground_truth": "x"},
            ]
        )
        project.write_task(policy=acting(server, api_key_env="MY_VALUE"))
        listed = f"MY_VALUE={origin(server)}"
        done = await run(
            project,
            *("task.yaml", "-vv", "--record", "cassette.jsonl"),
            MY_VALUE=OTHER,
            REWARD_KIT_KEY_ORIGINS=listed,
        )
    assert len(server.requests) >= 2, done.stderr
    exported = project.call(
        *("export", str(project.run_path())), "--format", "csv", MY_VALUE=OTHER, REWARD_KIT_KEY_ORIGINS=listed
    )
    assert exported.returncode == 0, exported.stderr
    files = [path for path in project.folder.rglob("*") if path.is_file()]
    holding = [path.name for path in files if OTHER.encode() in path.read_bytes()]
    assert {"episodes.jsonl", "run.json", "run.log", "report.html", "cassette.jsonl"} <= {path.name for path in files}
    assert holding == ["rows.jsonl"]  # the user's own
    assert OTHER not in done.stdout + done.stderr + exported.stdout + exported.stderr

"""Harbor task folders as environments: a container per episode, a `bash` tool, and tests that write the reward.

The container starts from the image of the task. The tests run in it when the final state is read, after the agent's
last action, and the final state contains their rewards. The reward `harbor_tests` returns them as the score.
"""

from __future__ import annotations

import base64
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    check_call,
    hash_key,
    strict_tool,
    tools_by_name,
)
from reward_kit.environments.config import ResourceConfig, read_config, task_path
from reward_kit.environments.containers import Container, ContainerLimits, find_engine, start_container
from reward_kit.environments.harbor_task import (
    HarborTask,
    fill_variables,
    find_task_folders,
    is_task_folder,
    main_reward,
    parse_rewards,
    read_harbor_task,
)
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, did_you_mean
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION

_LOGS = "/logs/verifier"
_USUAL_COMMAND_S = 60.0
_SHOWN_LOG = 4_000
_MOST_REWARD_BYTES = 65_536
_TOOLS = tools_by_name(
    strict_tool(
        "bash",
        "Run a Bash script in the container and return its output. Each call starts a new shell.",
        command={"type": "string", "description": "the script"},
        timeout_s={
            "type": "number",
            "default": _USUAL_COMMAND_S,
            "description": "seconds after which the script is killed",
        },
    )
)


class HarborResourceConfig(ResourceConfig):
    """The configuration of `harbor`."""

    folder: str = Field(description="a Harbor task folder, or a folder of such folders")
    task: str | None = Field(default=None, description="the name of the task in a folder of tasks; rows may set it")
    network: bool | None = Field(
        default=None,
        description="whether the container has a network; by default as in task.toml, or none if it does not say",
    )
    pass_env: list[str] = Field(
        default_factory=list, description="environment variables of this machine that task.toml may use as ${NAME}"
    )
    task_folder: str | None = Field(default=None, description="the directory that folder is relative to")


class HarborResource(ForkableResource):
    """A container of a Harbor task."""

    deterministic = False
    takes_task_folder = True
    per_sample_keys = frozenset({"task"})

    def __init__(self) -> None:
        self._config = HarborResourceConfig(folder="")
        self._task: HarborTask | None = None
        self._env: dict[str, dict[str, str]] = {}
        self._container: Container | None = None
        self._key, self._deadline, self._has_own_tests, self._is_solved = "", 0.0, False, False
        self._result: dict[str, Any] | None = None

    async def setup(self, config: Mapping[str, Any]) -> None:
        self._config = settings = read_config(HarborResourceConfig, config, "harbor")
        self._task = task = read_harbor_task(_find_folder(settings))
        needs_network(task, settings.network)
        self._env = self._variables(task)
        if task.unsupported:
            raise ConfigError(
                f"{task.folder}: cannot be run, because these parts are not supported: {'; '.join(task.unsupported)}"
            )
        if not _is_dry_run():
            await find_engine()

    def _variables(self, task: HarborTask) -> dict[str, dict[str, str]]:
        """Return the environment variables of the container, the tests and the solution."""
        host = {}
        for name in self._config.pass_env:
            if name not in os.environ:
                raise ConfigError(f"pass_env: the environment variable {name} is not set")
            host[name] = os.environ[name]
        config = task.config
        tables = {"environment": config.environment, "verifier": config.verifier, "solution": config.solution}
        every = {
            name: fill_variables(table.env, host, f"{task.folder / 'task.toml'}: {name}.env")
            for name, table in tables.items()
        }
        return {name: {**every["environment"], **own} for name, own in every.items()}

    async def reset(self, seed: int | None = None) -> None:
        await self.close()
        task = self._given
        if not _is_dry_run():
            has_network = needs_network(task, self._config.network)
            self._container, self._has_own_tests = await start_task_container(task, has_network=has_network)
        self._key = hash_key(str(task.folder.name), task.instruction)
        self._deadline = time.monotonic() + task.config.agent_s
        self._result, self._is_solved = None, False

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        arguments = check_call(_TOOLS, action_name, action_params)
        seconds, script = arguments["timeout_s"], arguments["command"]
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
            raise ToolError(f"bash: timeout_s must be a positive number of seconds, got {seconds!r:.40}")
        if self._result is not None:
            raise ToolError("the tests have run; no action changes anything")
        left = self._deadline - time.monotonic()
        limit = f"the agent's time limit of {self._given.config.agent_s:g} s was exceeded"
        if left <= 0:
            return StepOutcome(limit, truncated=True)
        result = await self._running.run(
            script,
            seconds=min(seconds, left),
            env=self._env["solution" if self._is_solved else "environment"],
            user=self._given.config.agent.user,
        )
        self._key = hash_key(self._key, script, result.output, str(result.status))
        shown = result.output.rstrip("\n")
        if result.status is None and left <= seconds:
            return StepOutcome(f"{shown}\n[{limit}]".lstrip(), truncated=True)
        if result.status is None:
            shown += f"\n[the script was killed after {seconds:g} s]"
        elif result.status != 0:
            shown += f"\n[exit code {result.status}]"
        return StepOutcome(shown.lstrip("\n") or "[no output]")

    async def get_observation(self) -> Any:
        return self._given.instruction or None

    async def get_tools_spec(self) -> list[ToolSpec]:
        return list(_TOOLS.values())

    async def state_key(self) -> str:
        """Return a hash of the commands so far and their outputs, because the state of a container cannot be read."""
        return self._key

    async def expert_action(self) -> Mapping[str, Any] | None:
        """Return a command that writes and runs the solution of the task, and None after it."""
        task = self._given
        if self._is_solved:
            return None
        if "/solution/solve.sh" not in task.solution:
            raise EnvironmentFailure(f"{task.folder}: solution/solve.sh is missing")
        self._is_solved = True
        return {
            "type": "tool_call",
            "name": "bash",
            "arguments": {"command": solution_script(task), "timeout_s": task.config.agent_s},
        }

    async def final_state(self) -> StateSnapshot | None:
        """Run the tests once, and return their rewards.

        Without a valid reward, `problem` is the reason.
        """
        if self._container is None:
            return None
        if self._result is None:
            self._result = await run_tests(
                self._container,
                self._given,
                self._env["verifier"],
                seconds=self._given.config.verifier.timeout_sec,
                keeps_tests=self._has_own_tests,
            )
        return StateSnapshot.from_json(self._result)

    async def close(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            await container.close()

    @property
    def _given(self) -> HarborTask:
        if self._task is None:
            raise EnvironmentFailure("the harbor resource was not set up")
        return self._task

    @property
    def _running(self) -> Container:
        if self._container is None:
            raise EnvironmentFailure("the harbor resource has no container, because it was closed or not reset")
        return self._container


def _is_dry_run() -> bool:
    session = CURRENT_PROVIDER_SESSION.get()
    return session is not None and session.is_dry_run


def _find_folder(settings: HarborResourceConfig) -> Path:
    folder = task_path(settings.folder, settings.task_folder, "folder")
    tasks = {path.name: path for path in find_task_folders(folder)}
    if not tasks:
        raise ConfigError(f"folder: {folder} is not a Harbor task and contains none (a folder with task.toml)")
    if settings.task is None and not is_task_folder(folder):
        raise ConfigError(f"task: {folder} contains {len(tasks)} tasks; name one of them, or use it as dataset_path")
    name = settings.task if settings.task is not None else folder.name
    if name not in tasks:
        raise ConfigError(f"task: {folder} has no task {name!r}{did_you_mean(name, tasks)}")
    return tasks[name]


def needs_network(task: HarborTask, given: bool | None = None) -> bool:
    """Return whether the container of a task has a network, which is off unless the task or the user asks for it.

    Raises:
        ConfigError: neither says so, but the tests download something. Without a network, they would score 0.
    """
    written = task.config.environment.network_mode
    if given is None and written is None and (download := task.download()):
        raise ConfigError(
            f"{task.folder}: {download}, but task.toml has no environment.network_mode, so there would be no network; "
            "set it, or pass -T base_resource_config.network=true to run (=false if the tests work without it)"
        )
    return written == "public" if given is None else given


async def start_task_container(task: HarborTask, *, has_network: bool) -> tuple[Container, bool]:
    """Build or pull the image of a task, and start a container with the limits in `task.toml`.

    Returns:
        The container, and whether its image contains `/tests`.
    """
    engine, given = await find_engine(), task.config.environment
    if given.docker_image is not None:
        image = await engine.pull(given.docker_image, given.build_timeout_sec)
    elif (task.folder / "environment" / "Dockerfile").is_file():
        image = await engine.build(task.folder / "environment", given.build_timeout_sec)
    else:
        raise ConfigError(f"{task.folder}: environment/Dockerfile is missing; add it, or set environment.docker_image")
    limits = ContainerLimits(given.cpus, given.memory_mb, given.storage_mb, has_network)
    container = await start_container(engine, image, limits, given.workdir)
    try:
        found = await container.run(
            f"mkdir -p {_LOGS} /logs/agent /logs/artifacts && chmod -R 777 /logs && [ -e /tests ] && echo tests",
            seconds=_USUAL_COMMAND_S,
            user="root",
        )
    except BaseException:
        await container.close()
        raise
    return container, "tests" in found.output


async def run_tests(
    container: Container, task: HarborTask, env: Mapping[str, str], *, seconds: float, keeps_tests: bool
) -> dict[str, Any]:
    """Run the tests of a task in a container.

    Reward files and, unless `keeps_tests` is set, a directory `/tests` that the agent made are removed before.

    Returns:
        `rewards`, a mapping from names to numbers; `reward`, the main one; or `problem`, the reason why it is missing.
        `log` is the end of the tests' output.
    """
    stale = f"rm -rf {_LOGS}/reward.txt {_LOGS}/reward.json{'' if keeps_tests else ' /tests'}"
    await container.run(stale, seconds=_USUAL_COMMAND_S, user="root")
    await container.copy(task.tests)
    verifier = task.config.verifier
    result = await container.run("bash /tests/test.sh", seconds=seconds, env=env, user=verifier.user)
    found: dict[str, Any] = {"log": result.output[-_SHOWN_LOG:]}
    if result.status is None:
        return {**found, "problem": f"the tests did not end within {seconds:g} s"}
    texts = []
    for name in ("reward.json", "reward.txt"):
        # Only a regular file counts. A longer one is invalid.
        command = f"[ ! -f {_LOGS}/{name} ] || head -c {_MOST_REWARD_BYTES} {_LOGS}/{name}"
        read = await container.run(command, seconds=_USUAL_COMMAND_S, user="root", most_bytes=2 * _MOST_REWARD_BYTES)
        texts.append(read.output)
    try:
        rewards = parse_rewards(*texts)
    except (ValueError, RecursionError) as error:
        return {**found, "problem": f"{error} (exit code {result.status})"}
    return {**found, "rewards": rewards, "reward": main_reward(rewards)}


def solution_script(task: HarborTask) -> str:
    """Return a Bash script that writes the files of the solution and runs it."""
    lines = []
    for path, content in task.solution.items():
        quoted = shlex.quote(path)
        lines.append(f"mkdir -p {shlex.quote(os.path.dirname(path))}")  # noqa: PTH120 - a path in the container
        text = content.decode("utf-8", "replace")
        if text.encode() == content and text.endswith("\n") and "END_OF_FILE" not in text and "\0" not in text:
            lines.append(f"cat > {quoted} <<'END_OF_FILE'\n{text}END_OF_FILE")
        else:
            lines.append(f"base64 -d > {quoted} <<'END_OF_FILE'\n{base64.encodebytes(content).decode()}END_OF_FILE")
    return "\n".join([*lines, "bash /solution/solve.sh"])

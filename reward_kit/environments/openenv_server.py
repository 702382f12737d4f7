"""Serve an OpenEnv folder: `python -m reward_kit.environments.openenv_server FOLDER PORT`.

The server runs in a container built from the folder's Dockerfile or, without a container engine, with the Python of the
folder's `.venv` or with this Python. It ends with this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import anyio
import pydantic
import yaml
from pydantic import BaseModel, Field

from reward_kit.environments.containers import ContainerLimits, find_engine, start_container
from reward_kit.errors import ConfigError, RewardKitError
from reward_kit.limited_yaml import LimitedLoader
from reward_kit.validation import describe_validation_error

OPENENV_FILE = "openenv.yaml"
BUILD_S = 900.0
_DOCKERFILES = ("server/Dockerfile", "Dockerfile")
_ALL_IMPORTS = "import openenv, uvicorn"
_ENDS = (signal.SIGTERM, signal.SIGINT)


class _Resources(BaseModel):
    cpu: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    memory_mb: Annotated[int, Field(ge=16)] | None = None


class _Validation(BaseModel):
    resources: _Resources = Field(default_factory=_Resources)


class OpenEnvFolder(BaseModel):
    """The keys of `openenv.yaml` that are used. Others are ignored."""

    name: str = Field(min_length=1)
    app: str = Field(default="server.app:app", pattern=r"^[\w.]+:\w+$")
    port: int = Field(default=8000, ge=1, le=65535)
    validation: _Validation = Field(default_factory=_Validation)


def read_openenv_folder(folder: Path) -> OpenEnvFolder:
    """Read the `openenv.yaml` of a folder without running any of its code.

    Raises:
        ConfigError: the file is invalid.
    """
    file = folder / OPENENV_FILE
    try:
        data: Any = yaml.load(file.read_text(encoding="utf-8"), LimitedLoader)
        return OpenEnvFolder.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{file}: {'; '.join(describe_validation_error(error))}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())[:300]}") from error


async def _serve(folder: Path, port: int) -> None:
    """Serve until this process is stopped or the server ends."""
    given = read_openenv_folder(folder)
    dockerfile = next((folder / name for name in _DOCKERFILES if (folder / name).is_file()), None)
    try:
        engine = await find_engine()
        if dockerfile is None:
            raise ConfigError(f"{folder} has no Dockerfile (server/Dockerfile or Dockerfile)")
    except ConfigError as error:
        _serve_here(folder, given, port, str(error))
    arguments = {"BUILD_MODE": "standalone", "ENV_NAME": given.name}
    image = await engine.build(folder, BUILD_S, dockerfile=dockerfile, arguments=arguments)
    limits = ContainerLimits(given.validation.resources.cpu, given.validation.resources.memory_mb, has_network=True)
    container = await start_container(engine, image, limits, publish=f"127.0.0.1:{port}:{given.port}")
    try:
        with anyio.open_signal_receiver(*_ENDS) as signals:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_show_log, [engine.program, "logs", "--follow", container.name], tasks.cancel_scope)
                async for _ in signals:
                    tasks.cancel_scope.cancel()
    finally:
        await container.close()


async def _show_log(command: list[str], scope: anyio.CancelScope) -> None:
    await anyio.run_process(command, stdin=subprocess.DEVNULL, stdout=None, stderr=None, check=False)
    scope.cancel()  # the container has ended


def _serve_here(folder: Path, given: OpenEnvFolder, port: int, problem: str) -> NoReturn:
    """Replace this process by the server, run with a Python that has its packages."""
    own = folder / ".venv" / "bin" / "python"
    python = str(own) if own.is_file() else sys.executable
    found = subprocess.run([python, "-c", _ALL_IMPORTS], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        reason = found.stderr.strip().rpartition("\n")[2][:200]
        raise ConfigError(
            f"{problem}; {python} cannot run the server either: {reason}; install its packages in {folder / '.venv'}"
        )
    os.chdir(folder)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.execv(python, [python, "-m", "uvicorn", given.app, "--host", "127.0.0.1", "--port", str(port)])


if __name__ == "__main__":
    try:
        anyio.run(_serve, Path(sys.argv[1]), int(sys.argv[2]))
    except RewardKitError as error:
        sys.exit(str(error))

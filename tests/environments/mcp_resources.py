"""Servers and resources for the tests of `mcp`."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reward_kit.environments.mcp import McpResource
from reward_kit.processes import temporary_root

HERE = Path(__file__).parent
SDK = ["{python}", str(HERE / "mcp_server.py")]
FORMS = ["{python}", str(HERE / "mcp_forms_server.py")]
STATELESS = ["{python}", "-I", "-S", str(HERE / "mcp_stateless_server.py")]
TINY = ["{python}", "-I", "-S", str(HERE / "mcp_tiny_server.py")]
AFTER = f"\nimport runpy; runpy.run_path({TINY[-1]!r}, run_name='__main__')"
"""Python that becomes the tiny server, to stand after something else."""


@contextmanager
def served(command: list[str]) -> Iterator[str]:
    """Run a server over streamable HTTP, and yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, *command[1:], str(port)], stdout=quiet, stderr=quiet)
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


class opened:
    """Yield a resource that is set up and reset, and close it at the end."""

    def __init__(self, command: list[str] = TINY, **config) -> None:
        self._config = {"command": command, **config} if "url" not in config else config
        self._resource = McpResource()

    async def __aenter__(self) -> McpResource:
        await self._resource.setup(self._config)
        await self._resource.reset(0)
        return self._resource

    async def __aexit__(self, *_) -> None:
        await self._resource.close()


async def ask(resource: McpResource, tool: str, /, **arguments) -> str:
    return (await resource.step(tool, arguments)).observation


def copies() -> list[Path]:
    """Return the existing working copies."""
    return list(temporary_root().glob("mcp-*"))

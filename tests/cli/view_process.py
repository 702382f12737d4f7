"""`reward-kit view` in a separate process, and its pages fetched over HTTP."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar

from tests.cli.project import Project


@contextmanager
def viewer(project: Project, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process and its printed address."""
    process = subprocess.Popen(
        project.command("view", *arguments),
        cwd=project.folder,
        env=project.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def fetched(address: str, *paths: str) -> list[str]:
    """Return the page at the address, then those at other paths with its cookie."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    base = address.split("/?")[0]
    found = []
    for url in (address, *(base + path for path in paths)):
        with opener.open(url, timeout=120) as answer:
            found.append(answer.read().decode())
    return found

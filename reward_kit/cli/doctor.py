"""`reward-kit doctor`: what confines code on this machine, which packages are there, which endpoints answer."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from reward_kit.cli.doctor_endpoints import NONE_NAMED, asked, keys_set
from reward_kit.cli.echo import echo, echo_json
from reward_kit.errors import ConfigError, how_to_install
from reward_kit.sandbox import landlock
from reward_kit.sandbox.host import STRENGTHS, Availability, best_strength, probe

_WALLS = {
    "namespaces": "own users, files, processes and network; Landlock; system call filter; its tree is killed",
    "landlock": "Landlock and system call filter; starts no process; sees that others exist",
    "process": "limits only, confines nothing",
}
_ENOUGH_DESCRIPTORS = 1024
_FOR_CONTRIBUTORS = ("dev", "docs")
_ELSEWHERE = "serve the reward from a Linux container and name its URL with --reward, see docs/guides/serve.md"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+).*?extra\s*==\s*['\"]([A-Za-z0-9._-]+)['\"]")


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, envvar="REWARD_KIT_DOCTOR_JSON", help="Print JSON on standard output.")
@click.option(
    "--base-url",
    "base_urls",
    multiple=True,
    envvar="REWARD_KIT_DOCTOR_BASE_URL",
    metavar="URL",
    help="Ask this OpenAI-compatible endpoint as well; may be repeated.",
)
def command(as_json: bool, base_urls: tuple[str, ...]) -> int:
    """Show what this machine offers, what is missing, and which model endpoints answer.

    Each wall of the sandbox is tried in a throw-away process, so what is shown is what a run would get. Endpoints are
    the one of OPENAI_BASE_URL and OPENAI_API_KEY, and those of --base-url; each is asked for its list of models, once.
    A key goes only to the origins that it is configured for, which are listed under Keys. The exit code is 1 where
    model-written code cannot be confined, and where an endpoint of --base-url does not answer, else 0.

    \b
    Examples:
      reward-kit doctor
      reward-kit doctor --base-url http://localhost:8000/v1
    """
    found = asyncio.run(_examine(base_urls))
    if as_json:
        echo_json(found, indent=2)
    else:
        _show(found)
    confines = found["sandbox"]["confines_model_code"]
    given = {url.rstrip("/") for url in base_urls}
    silent = any(one["outcome"] != "ok" for one in found["endpoints"] if one["base_url"] in given)
    return 0 if confines and not silent else 1


async def _examine(base_urls: Sequence[str]) -> dict[str, Any]:
    endpoints = await asked(base_urls)  # first, since a wrong URL is told at once
    strengths = await probe()
    try:
        best: str | None = await best_strength("auto")
        refusal = ""
    except ConfigError as error:
        best, refusal = None, str(error)
    return {
        "python": {"version": platform.python_version(), "path": sys.executable},
        "system": {
            "name": platform.system(),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "user": os.geteuid(),
        },
        "sandbox": {
            "strength": best,
            "confines_model_code": best is not None,
            "refusal": refusal,
            "strengths": {one.strength: _told(one) for one in strengths},
        },
        "kernel": _kernel(),
        "limits": _limits(),
        "extras": _extras(),
        "packages": _packages(),
        "endpoints": [one.to_json() for one in endpoints],
        "keys": keys_set(),
    }


def _told(one: Availability) -> dict[str, Any]:
    return {"available": one.is_available, "reason": one.reason, "walls": _WALLS[one.strength]}


def _kernel() -> dict[str, Any]:
    if sys.platform != "linux":
        return {}
    return {
        "landlock": landlock.abi(),
        "seccomp": _read("/proc/sys/kernel/seccomp/actions_avail"),
        "user_namespaces": _user_namespaces(),
    }


def _user_namespaces() -> str:
    """What the kernel's own switches say of them; whether they can be made, the strengths above tell."""
    most = _read("/proc/sys/user/max_user_namespaces")
    if not most or most == "0":
        return "none allowed" if most else "not in this kernel"
    if _read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return "for root only (kernel.unprivileged_userns_clone)"
    if _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "restricted by AppArmor (kernel.apparmor_restrict_unprivileged_userns)"
    return f"allowed, at most {most}"


def _limits() -> dict[str, Any]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"open_files": soft, "open_files_at_most": hard, "processors": os.cpu_count()}


def _extras() -> dict[str, list[str]]:
    """What is missing of each extra; an empty list for one that is whole."""
    return {extra: [name for name in names if _version(name) is None] for extra, names in _required().items()}


def _packages() -> dict[str, str]:
    """The version of each package of an extra that is installed."""
    names = sorted({name for names in _required().values() for name in names})
    return {name: version for name in names if (version := _version(name)) is not None}


def _required() -> dict[str, list[str]]:
    """The packages of each extra, on this Python."""
    wanted: dict[str, list[str]] = {}
    try:
        requirements = importlib.metadata.requires("reward-kit") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path, not installed
        requirements = []
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is not None and not _is_for_another_python(requirement):
            wanted.setdefault(match[2], []).append(match[1])
    return wanted


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_for_another_python(requirement: str) -> bool:
    bound = re.search(r"python_version\s*<\s*['\"](\d+)\.(\d+)", requirement)
    return bound is not None and sys.version_info >= (int(bound[1]), int(bound[2]))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _show(found: dict[str, Any]) -> None:
    python, system, sandbox = found["python"], found["system"], found["sandbox"]
    echo(f"Python     {python['version']}, {python['path']}")
    echo(f"System     {system['name']} {system['kernel']}, {system['machine']}, user {system['user']}")
    echo("Sandbox")
    for name in STRENGTHS:
        one = sandbox["strengths"][name]
        mark, text = ("yes", one["walls"]) if one["available"] else ("no", one["reason"])
        echo(f"  {name:<12} {mark:<4} {text}")
    for name, value in found["kernel"].items():
        echo(f"  {name.replace('_', ' '):<16} {value if value not in ('', 0) else 'none'}")
    limits = found["limits"]
    few = "" if limits["open_files_at_most"] >= _ENOUGH_DESCRIPTORS else "; many episodes at once will not fit"
    echo(f"Descriptors {limits['open_files']:,}, may be raised to {limits['open_files_at_most']:,}{few}")
    _show_extras(found)
    _show_endpoints(found["endpoints"])
    _show_keys(found["keys"])
    if sandbox["strength"]:
        echo(f"\nModel-written code is confined with {sandbox['strength']}.")
    else:
        echo(f"\nModel-written code is refused here: {sandbox['refusal']}; {_ELSEWHERE}.")


def _show_extras(found: dict[str, Any]) -> None:
    echo("Extras")
    for extra, missing in found["extras"].items():
        if not missing:
            told = ", ".join(f"{name} {found['packages'][name]}" for name in _required()[extra])
        elif extra in _FOR_CONTRIBUTORS:
            continue
        else:
            told = f"missing: {', '.join(missing)}"
        echo(f"  {extra:<12} {told}")
    if any(found["extras"].values()):
        echo(f"  To add one, {how_to_install('NAME')}")


def _show_endpoints(endpoints: Sequence[dict[str, Any]]) -> None:
    echo("Endpoints")
    for one in endpoints:
        taken = "" if one["seconds"] is None else f"after {one['seconds'] * 1000:.0f} ms: "
        echo(f"  {one['base_url']}  {taken}{one['told']}")
    if not endpoints:
        echo(f"  {NONE_NAMED}")


def _show_keys(keys: Sequence[dict[str, Any]]) -> None:
    echo("Keys")
    for one in keys:
        source = "" if one["source"] == "environment" else f", from {one['source']}"
        echo(f"  {one['variable']}{source}  may go to {', '.join(one['origins']) or 'no origin'}")
    if not keys:
        echo("  none set")

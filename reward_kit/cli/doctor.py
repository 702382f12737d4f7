"""`reward-kit doctor`: what confines code on this machine, which packages are there, which endpoints answer.

An endpoint is asked as cheaply as can be, by one GET of `/models`, which is free. A key goes to the origins that it is
configured for (`providers/keys.py`) and nowhere else, not after a redirect either, and is never shown.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from reward_kit.cli.echo import echo, echo_json
from reward_kit.display_text import counted, shown
from reward_kit.errors import ConfigError, how_to_install
from reward_kit.providers.keys import (
    PROVIDERS,
    EndpointSettings,
    key_variable,
    listed_origins,
    origins_of,
    read_dotenv,
    resolve_endpoint,
)
from reward_kit.safe_input import MODEL_LIST_BYTES, read_beginning
from reward_kit.sandbox import landlock
from reward_kit.sandbox.host import STRENGTHS, Availability, best_strength, probe

if TYPE_CHECKING:
    import aiohttp

_PATIENCE_S = 10.0
_KEY, _URL = "OPENAI_API_KEY", "OPENAI_BASE_URL"
NONE_NAMED = f"none named: set {_KEY}, and {_URL} for a server of your own, or try one with --base-url URL"


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """What became of asking one endpoint.

    Attributes:
        base_url: of the endpoint.
        outcome: "ok", or the kind of trouble in one word.
        told: the same in words, with what to do about it.
        seconds: until all of the answer was there; None where none came.
        models: how many it offers; None where it does not say.
    """

    base_url: str
    outcome: str
    told: str
    seconds: float | None = None
    models: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


async def asked(base_urls: Sequence[str]) -> list[EndpointAnswer]:
    """Ask the endpoint of the environment, where it names one, and those that are given, all at once."""
    own = _of_the_environment()
    given = [resolve_endpoint(url, None, key_variable(url), needs_key=False) for url in base_urls]
    named = [own, *given] if isinstance(own, EndpointSettings) else given
    once = [one for place, one in enumerate(named) if one.base_url not in {other.base_url for other in named[:place]}]
    answers = await asyncio.gather(*map(_ask, once))
    return [own, *answers] if isinstance(own, EndpointAnswer) else answers


def _of_the_environment() -> EndpointSettings | EndpointAnswer | None:
    """The endpoint and its key; None where none is named; what is wrong with it where it cannot be asked."""
    named_in_file = read_dotenv(Path.cwd())
    if not any(os.environ.get(name) or named_in_file.get(name) for name in (_KEY, _URL)):
        return None
    try:
        return resolve_endpoint(needs_key=False)
    except ConfigError as error:
        return EndpointAnswer(f"${_URL}", "misconfigured", str(error))


def keys_set() -> list[dict[str, Any]]:
    """The variables that hold a key and are set, where they are, and which origins each may go to; no value."""
    dotenv = {name: value for name, value in read_dotenv(Path.cwd()).items() if value}
    shell = {name: value for name, value in os.environ.items() if value}
    found = []
    for name in sorted({*PROVIDERS, *listed_origins(shell)} & {*dotenv, *shell}):
        source, beside = ("environment", shell) if name in shell else (".env", {**dotenv, **shell})
        found.append({"variable": name, "source": source, "origins": sorted(origins_of(name, shell, beside))})
    return found


async def _ask(endpoint: EndpointSettings) -> EndpointAnswer:
    import aiohttp

    url, key = endpoint.base_url, endpoint.api_key
    headers = {"User-Agent": "reward-kit"} | ({"Authorization": f"Bearer {key}"} if key else {})
    limit = aiohttp.ClientTimeout(total=_PATIENCE_S)
    started = time.perf_counter()
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, cookie_jar=aiohttp.DummyCookieJar(), headers=headers) as session,
            session.get(f"{url}/models", allow_redirects=False) as response,
        ):
            body = await read_beginning(response, MODEL_LIST_BYTES) if response.status == 200 else b""
            seconds = time.perf_counter() - started
            return _of_status(url, response, body, seconds, endpoint.no_key)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return EndpointAnswer(url, *_of_error(error))


def _of_status(url: str, response: aiohttp.ClientResponse, body: bytes, seconds: float, no_key: str) -> EndpointAnswer:
    status = response.status
    if status == 200:
        return _of_models(url, body, seconds)
    if status in (401, 403):
        what = f"wants a key, and none was sent: {no_key}" if no_key else f"does not accept the key of {_KEY}"
        return EndpointAnswer(url, "unauthorised", f"unauthorised (HTTP {status}): it {what}", seconds)
    if status == 404:
        return EndpointAnswer(
            url, "not_found", "not found (HTTP 404): nothing at /models; does the URL end in /v1?", seconds
        )
    if 300 <= status < 400:
        host = shown(urlsplit(response.headers.get("Location", "")).hostname or "elsewhere", 100)
        return EndpointAnswer(url, "redirected", f"redirects to {host} (HTTP {status}): name that URL instead", seconds)
    reason = shown(response.reason or "", 60)
    return EndpointAnswer(url, "failing", f"is there and fails: HTTP {status} {reason}".rstrip(), seconds)


def _of_models(url: str, body: bytes, seconds: float) -> EndpointAnswer:
    try:
        models = len(json.loads(body)["data"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return EndpointAnswer(
            url, "foreign", "answers, and not as OpenAI's API does: does the URL end in /v1?", seconds
        )
    return EndpointAnswer(url, "ok", f"answers, {counted(models, 'model')}", seconds, models)


def _of_error(error: Exception) -> tuple[str, str]:
    """The word and the words for an error of aiohttp's; those have no secret in them, but none is shown either."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "unknown_host", "unknown host: its name has no address (DNS); is it misspelt, or the network away?"
    if isinstance(error, aiohttp.ClientSSLError):
        return "untrusted", "no secure connection comes about (TLS): is its certificate accepted, is it not http://?"
    if isinstance(error, TimeoutError):
        return "silent", f"silent: no answer within {_PATIENCE_S:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, ConnectionRefusedError):
            return "refused", "refused: nothing listens there; is the server running?"
        return "unreachable", f"unreachable: {error.os_error.strerror or 'no connection comes about'}"
    return "broken", f"broken: it does not speak HTTP as expected ({type(error).__name__})"


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

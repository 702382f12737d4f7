"""`reward-kit doctor`: check the sandbox, the installed packages and the model endpoints.

Each endpoint receives one GET request for `/models`. The request is free of charge. A key is sent only to the origins
for which it is configured (`providers/keys.py`), even after a redirect. Keys are never printed.
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
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click

from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.options import json_option
from reward_kit.display_text import escape_text, pluralize
from reward_kit.errors import ConfigError, install_hint
from reward_kit.providers.keys import (
    PROVIDERS,
    EndpointSettings,
    allowed_origins,
    configured_origins,
    key_variable,
    read_dotenv,
    resolve_endpoint,
)
from reward_kit.safe_input import MODEL_LIST_BYTES, read_prefix
from reward_kit.sandbox import landlock
from reward_kit.sandbox.host import STRENGTHS, best_strength, probe

_TIMEOUT_S = 10.0
_KEY, _URL = "OPENAI_API_KEY", "OPENAI_BASE_URL"
NO_ENDPOINT = f"none configured; set {_KEY} (and {_URL} for your own server), or check an endpoint with --base-url URL"


class EndpointAnswer(NamedTuple):
    """The response of an endpoint.

    `outcome` is "ok" or one word that names the problem. `seconds` is the time until the complete response was
    received, or None if there was no response. `models` is the number of models, or None if it is unknown.
    """

    base_url: str
    outcome: str
    message: str
    seconds: float | None = None
    models: int | None = None


async def ask_endpoints(base_urls: Sequence[str]) -> list[EndpointAnswer]:
    """Query the given endpoints and, if an endpoint is configured in the environment, that endpoint.

    All endpoints are queried concurrently.
    """
    endpoints, answers = [], []
    in_file = read_dotenv(Path.cwd())
    if any(os.environ.get(name) or in_file.get(name) for name in (_KEY, _URL)):
        try:
            endpoints.append(resolve_endpoint(needs_key=False))
        except ConfigError as error:
            answers.append(EndpointAnswer(f"${_URL}", "misconfigured", str(error)))
    endpoints += [resolve_endpoint(url, None, key_variable(url), needs_key=False) for url in base_urls]
    once = {one.base_url: one for one in reversed(endpoints)}
    ordered = [once[url] for url in dict.fromkeys(one.base_url for one in endpoints)]
    return [*answers, *await asyncio.gather(*map(_ask, ordered))]


def configured_keys() -> list[dict[str, Any]]:
    """Return the name, source and allowed origins of each key variable that is set, but not its value."""
    dotenv = {name: value for name, value in read_dotenv(Path.cwd()).items() if value}
    shell = {name: value for name, value in os.environ.items() if value}
    found = []
    for name in sorted({*PROVIDERS, *configured_origins(shell)} & {*dotenv, *shell}):
        source, beside = ("environment", shell) if name in shell else (".env", {**dotenv, **shell})
        found.append({"variable": name, "source": source, "origins": sorted(allowed_origins(name, shell, beside))})
    return found


async def _ask(endpoint: EndpointSettings) -> EndpointAnswer:
    import aiohttp

    url, key = endpoint.base_url, endpoint.api_key
    path, question, query = url.partition("?")
    models_url = f"{path}/models{question}{query}"
    headers = {"User-Agent": "reward-kit"} | ({"Authorization": f"Bearer {key}"} if key else {})
    limit = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    started = time.perf_counter()
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, cookie_jar=aiohttp.DummyCookieJar(), headers=headers) as session,
            session.get(models_url, allow_redirects=False) as response,
        ):
            body = await read_prefix(response, MODEL_LIST_BYTES) if response.status == 200 else b""
            status, seconds, models = response.status, time.perf_counter() - started, None
            location, reason = response.headers.get("Location", ""), response.reason or ""
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return EndpointAnswer(url, *_describe_error(error))
    if status == 200:
        try:
            models = len(json.loads(body)["data"])
            outcome, message = "ok", f"available, {pluralize(models, 'model')}"
        except (ValueError, TypeError, KeyError, RecursionError):
            outcome, message = (
                "foreign",
                "the response is not from an OpenAI-compatible API; does the URL end in /v1?",
            )
    elif status in (401, 403):
        no_key = endpoint.no_key
        what = f"requires a key, but none was sent: {no_key}" if no_key else f"rejects the key in {_KEY}"
        outcome, message = "unauthorized", f"unauthorized (HTTP {status}): the endpoint {what}"
    elif status == 404:
        outcome, message = "not_found", "not found (HTTP 404): /models does not exist; does the URL end in /v1?"
    elif 300 <= status < 400:
        host = escape_text(urlsplit(location).hostname or "elsewhere", 100)
        outcome, message = "redirected", f"redirects to {host} (HTTP {status}); use the new URL instead"
    else:
        outcome, message = "failing", f"server error: HTTP {status} {escape_text(reason, 60)}".rstrip()
    return EndpointAnswer(url, outcome, message, seconds, models)


def _describe_error(error: Exception) -> tuple[str, str]:
    """Return the type and a description of an aiohttp error. The description does not contain the error's message."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "unknown_host", "unknown host: DNS lookup failed; check the spelling and the network"
    if isinstance(error, aiohttp.ClientSSLError):
        return "untrusted", "TLS connection failed: check the certificate, or use http:// if the server has none"
    if isinstance(error, TimeoutError):
        return "silent", f"no response within {_TIMEOUT_S:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, ConnectionRefusedError):
            return "refused", "connection refused; is the server running?"
        return "unreachable", f"unreachable: {error.os_error.strerror or 'connection failed'}"
    return "broken", f"invalid HTTP response ({type(error).__name__})"


_CONFINEMENT = {
    "namespaces": "separate users, files, processes and network; Landlock; system call filter; kills all descendants",
    "landlock": "Landlock and system call filter; cannot start processes; can see the processes of the machine",
    "process": "resource limits only, no confinement",
}
_ENOUGH_DESCRIPTORS = 1024
_FOR_CONTRIBUTORS = ("dev", "docs")
_ELSEWHERE = "serve the reward from a Linux container and pass its URL as --reward, see docs/guides/serve.md"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+).*?extra\s*==\s*['\"]([A-Za-z0-9._-]+)['\"]")


@click.command(name="doctor")
@json_option("Print JSON on standard output.")
@click.option(
    "--base-url",
    "base_urls",
    multiple=True,
    metavar="URL",
    help="Also check this OpenAI-compatible endpoint; may be repeated.",
)
def command(as_json: bool, base_urls: tuple[str, ...]) -> int:
    """Check this machine's sandbox, packages and model endpoints.

    Each sandbox level is tested in a temporary process, as in a run. The endpoints are those in OPENAI_BASE_URL (with
    OPENAI_API_KEY) and --base-url. Each endpoint receives one request for its list of models. A key is sent only to the
    origins for which it is configured, which are listed under Keys. The exit code is 1 if model-written code cannot be
    confined or if an endpoint given by --base-url does not respond, and 0 otherwise.

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
    endpoints = await ask_endpoints(base_urls)  # Do this first, so that an invalid URL is reported immediately
    import resource

    strengths = await probe()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
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
            "strengths": {
                one.strength: {
                    "available": one.is_available,
                    "reason": one.reason,
                    "confinement": _CONFINEMENT[one.strength],
                }
                for one in strengths
            },
        },
        "kernel": _kernel(),
        "limits": {"open_files": soft, "open_files_at_most": hard, "processors": os.cpu_count()},
        "extras": _extras(),
        "packages": _packages(),
        "endpoints": [one._asdict() for one in endpoints],
        "keys": configured_keys(),
    }


def _kernel() -> dict[str, Any]:
    """Return the kernel settings that limit the sandbox."""
    if sys.platform != "linux":
        return {}
    most = _read("/proc/sys/user/max_user_namespaces")
    if not most or most == "0":
        namespaces = "none allowed" if most else "not in this kernel"
    elif _read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        namespaces = "for root only (kernel.unprivileged_userns_clone)"
    elif _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        namespaces = "restricted by AppArmor (kernel.apparmor_restrict_unprivileged_userns)"
    else:
        namespaces = f"allowed, at most {most}"
    seccomp = _read("/proc/sys/kernel/seccomp/actions_avail")
    return {"landlock": landlock.abi(), "seccomp": seccomp, "user_namespaces": namespaces}


def _extras() -> dict[str, list[str]]:
    """Return the missing packages of each extra."""
    return {extra: [name for name in names if _version(name) is None] for extra, names in _required().items()}


def _packages() -> dict[str, str]:
    """Return the version of each installed package that belongs to an extra."""
    names = sorted({name for names in _required().values() for name in names})
    return {name: version for name in names if (version := _version(name)) is not None}


def _required() -> dict[str, list[str]]:
    """Return the packages that each extra requires on this version of Python."""
    wanted: dict[str, list[str]] = {}
    try:
        requirements = importlib.metadata.requires("reward-kit") or []
    except importlib.metadata.PackageNotFoundError:  # A checkout on the path, not installed
        requirements = []
    for requirement in requirements:
        bound = re.search(r"python_version\s*<\s*['\"](\d+)\.(\d+)", requirement)
        is_for_older = bound is not None and sys.version_info >= (int(bound[1]), int(bound[2]))
        if (match := _REQUIREMENT.match(requirement)) is not None and not is_for_older:
            wanted.setdefault(match[2], []).append(match[1])
    return wanted


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
        mark, text = ("yes", one["confinement"]) if one["available"] else ("no", one["reason"])
        echo(f"  {name:<12} {mark:<4} {text}")
    for name, value in found["kernel"].items():
        echo(f"  {name.replace('_', ' '):<16} {value if value not in ('', 0) else 'none'}")
    limits = found["limits"]
    few = "" if limits["open_files_at_most"] >= _ENOUGH_DESCRIPTORS else "; too few for many concurrent episodes"
    echo(f"Descriptors {limits['open_files']:,}, can be raised to {limits['open_files_at_most']:,}{few}")
    echo("Extras")
    for extra, missing in found["extras"].items():
        if not missing:
            versions = ", ".join(f"{name} {found['packages'][name]}" for name in _required()[extra])
            echo(f"  {extra:<12} {versions}")
        elif extra not in _FOR_CONTRIBUTORS:
            echo(f"  {extra:<12} missing: {', '.join(missing)}")
    if any(found["extras"].values()):
        echo(f"  To add one, {install_hint('NAME')}")
    echo("Endpoints")
    for one in found["endpoints"]:
        taken = "" if one["seconds"] is None else f"after {one['seconds'] * 1000:.0f} ms: "
        echo(f"  {one['base_url']}  {taken}{one['message']}")
    if not found["endpoints"]:
        echo(f"  {NO_ENDPOINT}")
    echo("Keys")
    for one in found["keys"]:
        source = "" if one["source"] == "environment" else f", from {one['source']}"
        echo(f"  {one['variable']}{source}  may be sent to {', '.join(one['origins']) or 'no origin'}")
    if not found["keys"]:
        echo("  none set")
    if sandbox["strength"]:
        echo(f"\nModel-written code is confined with {sandbox['strength']}.")
    else:
        echo(f"\nModel-written code cannot be run on this machine: {sandbox['refusal']}; {_ELSEWHERE}.")

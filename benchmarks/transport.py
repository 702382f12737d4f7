"""Client CPU time and rate per request, for several clients and APIs. The results are in development/transport.md.

    .venv/bin/python benchmarks/transport.py [-n 2000] [-c 32] [--rounds 3]

A local server in a subprocess responds immediately with the same small answer: a chat completion, unless the name of
the client ends in another API. Each client sends N requests with concurrency C in a new process, unaffected by the
imports and garbage of other clients. CPU time is that of the client process. The clients alternate, and the round with
the least CPU time is printed, and its ratio to plain aiohttp. Clients that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # measure this checkout, installed or not

from instant_server import running_server  # noqa: E402

Call = Callable[[], Awaitable[Any]]
BODY: dict[str, Any] = {
    "model": "bench",
    "messages": [
        {"role": "system", "content": "Add the numbers with the tool, then say the result."},
        {"role": "user", "content": "What is 17 + 25?"},
    ],
    "seed": 7,
}


@asynccontextmanager
async def openai_sdk(url: str, concurrency: int) -> AsyncIterator[Call]:
    """Call the SDK with its defaults."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key="x") as client:
        yield lambda: client.chat.completions.create(**BODY)


@asynccontextmanager
async def openai_aiohttp(url: str, concurrency: int) -> AsyncIterator[Call]:
    """Call the SDK with its aiohttp adapter."""
    from openai import AsyncOpenAI, DefaultAioHttpClient

    async with DefaultAioHttpClient() as http, AsyncOpenAI(base_url=url, api_key="x", http_client=http) as client:
        yield lambda: client.chat.completions.create(**BODY)


@asynccontextmanager
async def openai_raw(url: str, concurrency: int) -> AsyncIterator[Call]:
    """Call the SDK with its aiohttp adapter, without creating response models."""
    from openai import AsyncOpenAI, DefaultAioHttpClient

    async with DefaultAioHttpClient() as http, AsyncOpenAI(base_url=url, api_key="x", http_client=http) as client:

        async def call() -> Any:
            return json.loads((await client.chat.completions.with_raw_response.create(**BODY)).content)

        yield call


@asynccontextmanager
async def openai_responses(url: str, concurrency: int) -> AsyncIterator[Call]:
    """Call the Responses API with the SDK and its defaults."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key="x") as client:
        yield lambda: client.responses.create(model=BODY["model"], input=BODY["messages"], store=False)


@asynccontextmanager
async def anthropic_sdk(url: str, concurrency: int) -> AsyncIterator[Call]:
    """Call Anthropic's SDK with its defaults."""
    from anthropic import AsyncAnthropic

    system, user = BODY["messages"]
    body = {"model": BODY["model"], "max_tokens": 1024, "system": system["content"], "messages": [user]}
    async with AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="x") as client:
        yield lambda: client.messages.create(**body)


def _httpx_like(name: str) -> Callable[[str, int], Any]:
    @asynccontextmanager
    async def client(url: str, concurrency: int) -> AsyncIterator[Call]:
        module = importlib.import_module(name)
        limits = module.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with module.AsyncClient(limits=limits, timeout=60) as http:

            async def call() -> Any:
                return (await http.post(f"{url}/chat/completions", json=BODY)).json()

            yield call

    return client


@asynccontextmanager
async def plain_aiohttp(url: str, concurrency: int) -> AsyncIterator[Call]:
    """Call aiohttp with its defaults, and parse with the standard library."""
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:

        async def call() -> Any:
            async with session.post(f"{url}/chat/completions", json=BODY) as response:
                return json.loads(await response.read())

        yield call


@asynccontextmanager
async def chat_endpoint(url: str, concurrency: int, api: str = "chat") -> AsyncIterator[Call]:
    """Call `ChatEndpoint.complete`, with deadlines, retries and parsing."""
    from reward_kit.providers import ChatEndpoint
    from reward_kit.providers.chat import DIALECTS

    endpoint = ChatEndpoint(url, "x", dialect=DIALECTS[api])
    yield lambda: endpoint.complete(BODY)
    await endpoint.aclose()


@asynccontextmanager
async def openai_policy(url: str, concurrency: int, api: str = "chat") -> AsyncIterator[Call]:
    """Open a session of `OpenAIAgentPolicy`, get an action, and close the session."""
    from reward_kit.agent import EpisodeContext, OpenAIAgentPolicy
    from reward_kit.models import Message

    policy = OpenAIAgentPolicy("bench", base_url=url, api_key="x", api=api)
    conversation = [Message(**message) for message in BODY["messages"]]

    async def call() -> Any:
        session = await policy.open(EpisodeContext("r", 7))
        output = await session.get_action(conversation)
        await session.close()
        return output

    yield call
    await policy.close()


CLIENTS: dict[str, tuple[str, Callable[[str, int], Any]]] = {
    "openai SDK": ("openai", openai_sdk),
    "openai SDK + its aiohttp client": ("openai", openai_aiohttp),
    "openai SDK + aiohttp, raw response": ("openai", openai_raw),
    "httpx": ("httpx", _httpx_like("httpx")),
    "httpx2": ("httpx2", _httpx_like("httpx2")),
    "aiohttp": ("aiohttp", plain_aiohttp),
    "ours: ChatEndpoint": ("reward_kit.providers.chat", chat_endpoint),
    "ours: OpenAIAgentPolicy": ("reward_kit.agent.policies.openai_policy", openai_policy),
    "openai SDK, Responses": ("openai", openai_responses),
    "ours: ChatEndpoint, Responses": ("reward_kit.providers.responses", partial(chat_endpoint, api="responses")),
    "ours: OpenAIAgentPolicy, Responses": ("reward_kit.providers.responses", partial(openai_policy, api="responses")),
    "anthropic SDK, Messages": ("anthropic", anthropic_sdk),
    "ours: ChatEndpoint, Messages": ("reward_kit.providers.messages", partial(chat_endpoint, api="messages")),
    "ours: OpenAIAgentPolicy, Messages": ("reward_kit.providers.messages", partial(openai_policy, api="messages")),
}


def _available(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(name: str, url: str, requests: int, concurrency: int) -> dict[str, float]:
    """Return the CPU milliseconds per request and the requests/s of a client."""
    async with CLIENTS[name][1](url, concurrency) as call:
        left = concurrency * 4  # warm-up of connections and caches

        async def worker() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await call()

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        left = requests
        cpu, wall = _cpu_s(), time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        cpu, wall = _cpu_s() - cpu, time.perf_counter() - wall
    return {"cpu_ms": 1000 * cpu / requests, "per_s": requests / wall}


def _measure_in_subprocess(name: str, url: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--client", name, "--url", url]
    command += ["-n", str(args.requests), "-c", str(args.concurrency)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def _print_table(rows: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    base = rows["aiohttp"]["cpu_ms"]
    print(f"{args.requests} requests, concurrency {args.concurrency}, best of {args.rounds}, {os.cpu_count()} cores")
    print(f"| {'client':36} | CPU ms/request | requests/s | CPU ratio     |")
    print(f"|{'-' * 38}|---------------:|-----------:|--------------:|")
    for name, row in rows.items():
        print(f"| {name:36} | {row['cpu_ms']:14.3f} | {row['per_s']:10.0f} | {row['cpu_ms'] / base:13.2f} |")


def compare(args: argparse.Namespace) -> None:
    """Measure every installed client and print the table."""
    names = [name for name, (module, _) in CLIENTS.items() if _available(module)]
    for name in CLIENTS.keys() - names:
        print(f"{name}: not installed, skipped")
    with running_server() as url:
        rounds = [{name: _measure_in_subprocess(name, url, args) for name in names} for _ in range(args.rounds)]
    _print_table({name: min((row[name] for row in rounds), key=lambda row: row["cpu_ms"]) for name in names}, args)


def main() -> None:
    """Compare all clients, or measure the one given with `--client`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--requests", type=int, default=2000)
    parser.add_argument("-c", "--concurrency", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(json.dumps(asyncio.run(measure(args.client, args.url, args.requests, args.concurrency))))
    else:
        compare(args)


if __name__ == "__main__":
    main()

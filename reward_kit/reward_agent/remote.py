"""`RemoteReward`, a reward that `reward-kit serve` provides at a URL. It is used like any other reward.

The scores and failures are the same as if the reward were called in this process, because values that JSON cannot
represent are sent in the format of `episodes/json_codec.py`. Network errors are retried. If they persist, the rollout
is unscored with the class `provider_error`, `timeout` or `refused`. All responses are untrusted.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from reward_kit.episodes.json_codec import from_json_value, to_json_value
from reward_kit.errors import (
    ConfigError,
    DeadlineError,
    EpisodeError,
    Failure,
    FailureClass,
    ProviderError,
    RewardError,
    RewardKitError,
    boundary,
)
from reward_kit.models import EvaluateResult
from reward_kit.providers.faults import TransientError, UnreachableError, excerpt, status_error
from reward_kit.providers.keys import check_allowed, read_dotenv
from reward_kit.providers.request_queue import RetryPolicy, with_retries
from reward_kit.reward_agent.sandboxed import state_record, steps_record
from reward_kit.reward_agent.scoring import Scored, ScoringRequest, failure_from_error, score_unbroken
from reward_kit.safe_input import REWARD_ANSWER_BYTES, TooLargeError, parse_json, read_body
from reward_kit.telemetry.current import trace_headers
from reward_kit.typed_interface import EvaluationMode, Origin
from reward_kit.validation import check_positive, describe_validation_error

if TYPE_CHECKING:
    import aiohttp

KEY_VARIABLE = "REWARD_KIT_REWARD_API_KEY"
"""The environment variable that contains the key for rewards over HTTP."""
_ALWAYS = frozenset({"messages", "rollout_id", "assistant_turns"})
_OWN_FIELDS = ("ground_truth", "sample", "environment_return", "stop_reason")
_ADDRESS = re.compile(r"https?://[^/?#@\s]+(/[^?#\s]*)?/v1/rewards/[A-Za-z0-9._-]+\Z")
_EXAMPLE = "http://127.0.0.1:8700/v1/rewards/exact"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_REFUSED = frozenset({400, 404, 405, 406, 411, 413, 414, 415, 422, 431})
logger = logging.getLogger("reward_kit.reward_agent")


class FailureBody(BaseModel):
    """The reason why a score is missing."""

    model_config = ConfigDict(strict=True, title="Failure", populate_by_name=True)

    failure_class: FailureClass = Field(alias="class")
    where: str
    message: str
    traceback: str = ""


class AnswerBody(BaseModel):
    """The score of a rollout, or the reason why it is missing. A missing score is null, not zero."""

    model_config = ConfigDict(strict=True, title="Score")

    rollout_id: str
    score: float | None = Field(description="The score, or null if the rollout is unscored.")
    result: EvaluateResult | None = Field(
        description="The return value of the reward function, or null if the function failed."
    )
    error: FailureBody | None = Field(description="The reason why the score is missing.")
    duration_s: float = Field(ge=0, description="Duration of the call, including the wait for a thread or worker.")
    sandbox: dict[str, str] | None = Field(
        description="The level and the strength of the sandbox, or null if there was no call."
    )
    stdout: str = ""
    stderr: str = ""
    is_output_cut: bool = False
    retry_after_s: float | None = Field(None, ge=0)


class AboutBody(BaseModel):
    """The description of a reward on a server."""

    model_config = ConfigDict(strict=True, title="Reward")

    name: str = Field(description="The name of the reward in its URL.")
    id: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")
    mode: EvaluationMode = Field(description='"batch": the rollouts of a request are one group, scored in one call.')
    parameters: list[str] | None = Field(description="Parameters of the reward, or null if it accepts any parameters.")
    required: list[str] = Field(description="Parameters that have no default value.")
    level: str = Field(description="Sandbox level: in_process, warm or isolated.")
    digest: str = Field(
        min_length=8, max_length=200, description="A digest that changes with the code or the options of the reward."
    )
    deadline_s: float | None = Field(gt=0, description="Deadline of one call, in seconds.")
    max_batch: int = Field(ge=1, description="Maximum number of rollouts in a request.")


def is_address(reference: str) -> bool:
    """Return True if a reference is the URL of a reward."""
    return reference.startswith(("http://", "https://"))


def checked_address(url: str) -> str:
    """Check a reward's URL, and return it without a trailing slash.

    Raises:
        ConfigError: If the URL cannot be the URL of a reward, or if it contains a user name or a password.
    """
    if "@" in url:
        raise ConfigError(f"the URL of a reward must not contain a user name or password; set {KEY_VARIABLE} instead")
    address = url.rstrip("/")
    try:
        is_right = bool(_ADDRESS.match(address)) and urlsplit(address).port != 0
    except ValueError:
        is_right = False
    if not is_right:
        if address != (shown := re.split("[?#]", address)[0]):  # The rest of the URL may contain a key.
            raise ConfigError(f"{shown + '…'!r} is not the address of a reward; remove everything after its path")
        near = address.removesuffix("/score").removesuffix("/score_batch")
        fix = f"use {near}" if near != address and _ADDRESS.match(near) else "an address looks like " + _EXAMPLE
        raise ConfigError(f"{url!r} is not the address of a reward; {fix}")
    return address


def check_named_by_file(url: str) -> None:
    """Raise an error if the user's key must not be sent to a URL that a file contains.

    The file may be untrusted. See `providers/keys.py`.
    """
    url = checked_address(url)
    if _key():
        check_allowed(KEY_VARIABLE, url, os.environ)


def _key() -> str:
    return (os.environ.get(KEY_VARIABLE) or read_dotenv(Path.cwd()).get(KEY_VARIABLE, "")).strip()


def key_for(url: str, api_key: str | None = None) -> str:
    """Return the key for a server: `api_key`, or the key in the environment or in the nearest `.env` file."""
    key = (api_key or _key()).strip()
    if not key:
        raise ConfigError(f"no key for {url}; set {KEY_VARIABLE} in the environment or in a .env file")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"the key for {url} ({KEY_VARIABLE}) contains characters that are invalid in an HTTP header")
    return key


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Timeouts and retries of requests to a reward server.

    Attributes:
        timeout_s: the time limit of an attempt in seconds, from its start to the last byte of the response.
        connect_timeout_s: the time limit for connecting, in seconds.
        policy: the retry policy for a server that cannot be reached, is overloaded or fails (408, 409, 429, 500, 502 to
            504). Its waits are added to the server's Retry-After. An attempt that times out is not retried.

    Raises:
        ConfigError: If a time is not a positive number.
    """

    timeout_s: float = 660.0
    connect_timeout_s: float = 10.0
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        check_positive("timeout_s", self.timeout_s)
        check_positive("connect_timeout_s", self.connect_timeout_s)
        check_positive("max_attempts", self.policy.max_attempts, is_integer=True)
        check_positive("budget_s", self.policy.budget_s)


class RewardEndpoint:
    """An HTTP client with persistent connections to one reward's URL. Messages never contain the key."""

    def __init__(self, url: str, key: str, request_options: RequestOptions) -> None:
        self.url = url
        self._key, self._options = key, request_options
        self._jitter = random.Random()
        self._session: aiohttp.ClientSession | None = None

    def clone(self) -> RewardEndpoint:
        """Return a copy with separate connections."""
        return RewardEndpoint(self.url, self._key, self._options)

    async def __aenter__(self) -> Self:
        import aiohttp

        self._session = aiohttp.ClientSession(
            # The reward agent limits the requests in flight.
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=self._options.timeout_s, sock_connect=self._options.connect_timeout_s),
            # If it were compressed, a small response could expand to any size.
            headers={"Authorization": f"Bearer {self._key}", "Accept-Encoding": "identity", "User-Agent": "reward-kit"},
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request(self, action: str = "", body: bytes | None = None) -> Any:
        """Return the server's description of the reward, or its response to a JSON body.

        Args:
            action: "score", "score_batch", or "" for the description.
            body: the body as JSON, or None for the description.

        Raises:
            ConfigError: If the server rejects the request or the key.
            ProviderError: If the server cannot be reached, is overloaded or sends an invalid response, even after all
                retries.
            DeadlineError: If the server does not respond in time.
        """
        value, _ = await with_retries(lambda: self._attempt(action, body), self._options.policy, self._jitter)
        return value

    async def _attempt(self, action: str, body: bytes | None) -> Any:
        import aiohttp

        assert self._session is not None, "the reward is not open"
        url = f"{self.url}/{action}" if action else self.url
        method, headers = ("GET", {}) if body is None else ("POST", {"Content-Type": "application/json"})
        try:
            async with self._session.request(
                method, url, data=body, headers={**headers, **trace_headers()}, allow_redirects=False
            ) as response:
                status, answer = response.status, await read_body(response, REWARD_ANSWER_BYTES)
        except TooLargeError as error:
            raise ProviderError(f"{url}: the response exceeds the limit of {error}") from None
        except aiohttp.ConnectionTimeoutError as error:
            raise UnreachableError(f"{url}: could not connect within {self._options.connect_timeout_s:g} s") from error
        except TimeoutError as error:
            raise DeadlineError(f"{url} did not respond within timeout_s={self._options.timeout_s:g}") from error
        except (aiohttp.InvalidURL, aiohttp.ClientSSLError) as error:
            raise ProviderError(f"{url} failed: {self._excerpt(error)}") from error
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(
                f"{url} cannot be reached ({error.os_error.strerror or error.os_error}); is the server running?"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(f"{url} dropped the connection: {self._excerpt(error)}") from error
        if status == 200:
            try:
                return parse_json(answer)
            except (ValueError, RecursionError) as error:
                raise TransientError(f"{url} returned invalid JSON: {self._excerpt(error)}") from None
        if 300 <= status < 400:
            raise ConfigError(f"{url} redirects (HTTP {status}); use the address to which it redirects")
        problem = status_error(status, response.headers, answer, url, [self._key])
        if status in (401, 403):
            raise ConfigError(f"{problem}; check that {KEY_VARIABLE} is the key of this server")
        if status in _REFUSED:
            raise ConfigError(str(problem))
        raise problem

    def _excerpt(self, error: Exception) -> str:
        return excerpt(str(error) or type(error).__name__, [self._key])


class RemoteReward:
    """A reward on a server: the description of the reward and the scorer that calls it.

    See `scoring.Reward`. Create a `RemoteReward` with `RemoteReward.connect` or `load_reward`. The reward agent uses it
    as an async context manager.
    """

    def __init__(
        self, url: str, about: AboutBody, *, api_key: str | None = None, request_options: RequestOptions | None = None
    ) -> None:
        self.url, self.about = checked_address(url), about
        self._endpoint = RewardEndpoint(self.url, key_for(self.url, api_key), request_options or RequestOptions())
        self._deadline_s: float | None = None
        self.id, self.mode, self.digest = about.id, about.mode, about.digest
        self.parameters = None if about.parameters is None else frozenset(about.parameters)
        self.required = frozenset(about.required)
        # The files of the reward are on the server and are included in its digest.
        self.origin: Origin | None = None
        self.requirements: tuple[str, ...] = ()
        self.resources: Mapping[str, Any] = {}
        self.options: Mapping[str, Any] = {}

    @classmethod
    async def connect(
        cls, url: str, *, api_key: str | None = None, request_options: RequestOptions | None = None
    ) -> Self:
        """Return the reward at a URL, as described by the server.

        Args:
            url: the URL of the reward.
            api_key: the key. If None, `REWARD_KIT_REWARD_API_KEY` in the environment or in `.env` is used.
            request_options: the timeouts and retries.

        Raises:
            ConfigError: If the URL is invalid, if the key is missing, or if the server rejects the URL or the key.
            ProviderError: If the server cannot be reached or is not a reward server.
            DeadlineError: If the server does not respond in time.
        """
        url = checked_address(url)
        async with RewardEndpoint(url, key_for(url, api_key), request_options or RequestOptions()) as endpoint:
            description = await endpoint.request()
        try:
            about = AboutBody.model_validate(description, strict=True)
        except pydantic.ValidationError as error:
            problems = "; ".join(describe_validation_error(error)[:3])
            raise ProviderError(f"{url} is not a reward on a reward server: {problems}") from None
        return cls(url, about, api_key=api_key, request_options=request_options)

    def scorer(self, deadline_s: float | None = None) -> RemoteReward:
        """Return a copy with separate connections.

        If a call exceeds `deadline_s`, its rollouts are unscored, with the failure class `timeout`.
        """
        if deadline_s is not None:
            check_positive("deadline_s", deadline_s)
        other = copy.copy(self)
        other._endpoint, other._deadline_s = self._endpoint.clone(), deadline_s
        return other

    async def __aenter__(self) -> Self:
        await self._endpoint.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._endpoint.__aexit__(kind, error, trace)

    async def score(self, request: ScoringRequest) -> Scored:
        if request.failure is not None:
            return Scored(request.rollout_id, None, request.failure)
        return (await self._scored([request], "score"))[0]

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        return await score_unbroken(requests, self._score_complete)

    async def _score_complete(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        # The server rejects a group that is too large. Requests to a pointwise reward can be split.
        size = len(requests) if self.mode == "batch" else self.about.max_batch
        parts = [requests[start : start + size] for start in range(0, len(requests), size)]
        return [scored for part in parts for scored in await self._scored(part, "score_batch")]

    async def _scored(self, requests: Sequence[ScoringRequest], action: str) -> list[Scored]:
        began = time.perf_counter()
        try:
            with boundary(RewardError, f"reward {self.id!r} at {self.url}"):
                rollouts = [encode_rollout(request, self.parameters) for request in requests]
                body = rollouts[0] if action == "score" else {"rollouts": rollouts}
                sent = json.dumps({**body, "codec": "typed"}, allow_nan=False, separators=(",", ":")).encode("ascii")
                try:
                    async with asyncio.timeout(self._deadline_s):
                        answer = await self._endpoint.request(action, sent)
                except TimeoutError:
                    raise DeadlineError(
                        f"reward {self.id!r} at {self.url} exceeded its deadline of {self._deadline_s} s"
                    ) from None
                return self._read(answer, requests, action, time.perf_counter() - began)
        except RewardKitError as error:
            failure, asked_s = failure_from_error(error)
            duration_s = time.perf_counter() - began
        logger.info("%d episodes cannot be scored: %s", len(requests), failure.message)
        return [Scored(one.rollout_id, None, failure, duration_s, retry_after_s=asked_s) for one in requests]

    def _read(self, answer: Any, requests: Sequence[ScoringRequest], action: str, duration_s: float) -> list[Scored]:
        answers = [answer] if action == "score" else answer.get("scores") if isinstance(answer, Mapping) else None
        if not isinstance(answers, list) or len(answers) != len(requests):
            raise ProviderError(f"{self.url} did not return {len(requests)} scores")
        scored = []
        try:
            for request, one in zip(requests, answers, strict=True):
                body = AnswerBody.model_validate(from_json_value(one), strict=True)
                named, reported, result = request.rollout_id, body.error, body.result
                if body.rollout_id != named:
                    raise ValueError(f"got the score of rollout {body.rollout_id!r} instead of rollout {named!r}")
                failure = None
                if reported is not None:
                    fields = reported.failure_class, reported.where, reported.message, reported.traceback
                    failure = Failure(*fields)
                elif result is None or body.score != result.score:
                    raise ValueError(f"got neither a score nor an error for rollout {named!r}")
                output = (body.stdout, body.stderr, body.is_output_cut)
                scored.append(Scored(named, result, failure, duration_s, body.sandbox, *output, body.retry_after_s))
            return scored
        except pydantic.ValidationError as error:
            problem = "; ".join(describe_validation_error(error)[:3])
        except (ValueError, KeyError, TypeError, EpisodeError) as error:
            problem = str(error)
        raise ProviderError(f"{self.url} returned an invalid score: {problem}")


def encode_rollout(request: ScoringRequest, wanted: frozenset[str] | None) -> dict[str, Any]:
    """Return the values of a rollout that the reward uses, encoded as JSON data."""
    names = request.names(wanted) | _ALWAYS
    values: dict[str, Any] = {
        "messages": [to_json_value(message.to_chat()) for message in request.messages],
        "rollout_id": to_json_value(request.rollout_id),
        "assistant_turns": [int(turn) for turn in request.assistant_turns],
    }
    for name in sorted(names & {*_OWN_FIELDS}):
        if (value := getattr(request, name)) is not None and name not in request.extra:
            values[name] = to_json_value(dict(value) if name == "sample" else value)
    if "state" in names and (state := state_record(request)) is not None:
        values["state"] = state
    if "step_data" in names and (episode := steps_record(request)) is not None:
        values["episode"] = episode
    if extra := {name: to_json_value(request.extra[name]) for name in names & request.extra.keys()}:
        values["extra"] = extra
    return values


def reward_notes(reward: RemoteReward) -> tuple[str, ...]:
    """Return a note for the user if the connection to the server is not encrypted."""
    address = urlsplit(reward.url)
    if address.scheme != "http" or address.hostname in _LOOPBACK:
        return ()
    return (f"reward {reward.id!r}: rollouts and the key are sent to {reward.url} unencrypted; use https",)

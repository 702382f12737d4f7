"""What goes over the wire between a reward server and its clients: rollouts to score, scores, and what a reward is.

The fields are those of `ScoringRequest` and `Scored`. Values are plain JSON; with `codec: "typed"`, values that JSON
does not have (tuples, NaN, bytes, lone surrogates, NumPy arrays) stand in the form of `episodes/json_codec.py`, so that
a reward behind HTTP gets what it would get in process.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import logging
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self
from urllib.parse import urlsplit

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from reward_kit.environments.base import StateSnapshot
from reward_kit.episodes.json_codec import from_json_value, to_json_value
from reward_kit.episodes.record import episode_from_record
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
    kind_of,
)
from reward_kit.models import EvaluateResult, Message
from reward_kit.providers.faults import TransientError, UnreachableError, excerpt, status_error
from reward_kit.providers.keys import check_allowed, read_dotenv
from reward_kit.providers.request_queue import RetryPolicy, with_retries
from reward_kit.reward_agent.confined import state_record, steps_record
from reward_kit.reward_agent.scoring import Scored, ScoringRequest, failure_of, scored_together
from reward_kit.safe_input import REWARD_ANSWER_BYTES, TooLargeError, read_body, read_strictly
from reward_kit.typed_interface import Mode, Origin
from reward_kit.validation import check_number, describe_validation_error

if TYPE_CHECKING:
    import aiohttp

Codec = Literal["plain", "typed"]

_BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"

_ALWAYS = frozenset({"messages", "rollout_id", "assistant_turns"})

_OWN_FIELDS = ("ground_truth", "sample", "environment_return", "stop_reason")

_OF_RESULT = set(EvaluateResult.model_fields)

_MOST_PROBLEMS = 5

_MOST_BITS = 64

MOST_PARTS = 10_000

"""Content parts, and tool calls, of one message."""


class StateBody(BaseModel):
    """A resource's final state as it is stored."""

    model_config = ConfigDict(strict=True, extra="forbid", title="State")

    kind: str = Field(description='The format of the payload: "json", "sqlite", "files", …')
    payload: str = Field(pattern=_BASE64, description="The payload in base64.")


class RolloutBody(BaseModel):
    """One rollout as a reward function may see it."""

    model_config = ConfigDict(strict=True, extra="forbid", title="Rollout")

    messages: list[Message] = Field(fail_fast=True, description="The whole conversation, in OpenAI chat form.")
    rollout_id: str | None = Field(None, description="Names it in the answer; by default its place in the request.")
    ground_truth: Any = Field(None, description="The sample's.")
    assistant_turns: list[int] | None = Field(
        None,
        fail_fast=True,
        description="The position in messages of each step's message; by default every assistant message is a step.",
    )
    sample: dict[str, Any] = Field(default_factory=dict, description="The sample's row.")
    environment_return: float | None = Field(None, description="The sum of the environment's rewards.")
    stop_reason: str | None = Field(None, description="Why the episode ended.")
    state: StateBody | None = Field(None, description="The final state, for rewards that name it.")
    episode: dict[str, Any] | None = Field(
        None,
        description="A line of episodes.jsonl, for rewards that name step_data; unscored where it cannot be read.",
    )
    extra: dict[str, Any] = Field(default_factory=dict, description="Further named values, such as goal_description.")


class ScoreBody(RolloutBody):
    """A request for one score."""

    model_config = ConfigDict(title="ScoreRequest")

    codec: Codec = Field("plain", description='"typed": values are coded as in episodes.jsonl.')


class BatchBody(BaseModel):
    """A request for several scores; to a batch reward they are one group."""

    model_config = ConfigDict(strict=True, extra="forbid", title="BatchRequest")

    rollouts: list[RolloutBody] = Field(min_length=1)
    codec: Codec = Field("plain", description='"typed": values are coded as in episodes.jsonl.')


class FailureBody(BaseModel):
    """Why there is no score."""

    model_config = ConfigDict(strict=True, title="Failure", populate_by_name=True)

    failure_class: FailureClass = Field(alias="class")
    where: str
    message: str
    traceback: str = ""

    def failure(self) -> Failure:
        """As it is kept on a score."""
        return Failure(self.failure_class, self.where, self.message, self.traceback)


class AnswerBody(BaseModel):
    """One rollout's score, or why it has none. Unscored is null, which is not zero."""

    model_config = ConfigDict(strict=True, title="Score")

    rollout_id: str
    score: float | None = Field(description="null where the rollout is unscored")
    result: EvaluateResult | None = Field(description="What the reward function returned; null where it failed.")
    error: FailureBody | None = Field(description="Why there is no score.")
    duration_s: float = Field(ge=0, description="Of the call, with its wait for a thread or a worker.")
    sandbox: dict[str, str] | None = Field(description="Where the reward ran.")
    stdout: str = ""
    stderr: str = ""
    is_output_cut: bool = False
    retry_after_s: float | None = Field(None, ge=0)


class BatchAnswerBody(BaseModel):
    """Scores in the order of the request."""

    model_config = ConfigDict(strict=True, title="Scores")

    scores: list[AnswerBody]


class AboutBody(BaseModel):
    """What a served reward is."""

    model_config = ConfigDict(strict=True, title="Reward")

    name: str = Field(description="As in its address.")
    id: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")
    mode: Mode = Field(description='"batch": the rollouts of a request are one group, scored in one call.')
    parameters: list[str] | None = Field(description="The values that it is given by name; null: any.")
    required: list[str] = Field(description="Those of them that have no default.")
    level: str = Field(description="Where it runs: in_process, warm or isolated.")
    digest: str = Field(min_length=8, max_length=200, description="Changes when its code or its options do.")
    deadline_s: float | None = Field(gt=0, description="For one call.")
    max_batch: int = Field(ge=1, description="Rollouts in a request.")


class ListBody(BaseModel):
    """All rewards of a server."""

    model_config = ConfigDict(strict=True, title="Rewards")

    rewards: list[AboutBody]


def decoded(rollout: Any, codec: Any) -> Any:
    """A rollout whose values are as they were before they were coded.

    Raises:
        EpisodeError: one of them is no code.
    """
    if codec != "typed" or not isinstance(rollout, Mapping):
        return rollout
    with boundary(EpisodeError, "a value is not coded as codec: typed says"):
        # The episode's own values are coded in its record already.
        return {key: value if key == "episode" else from_json_value(value) for key, value in rollout.items()}


def request_of(body: RolloutBody, place: int, *, wants_episode: bool) -> ScoringRequest:
    """The request for the score of a rollout.

    Args:
        body: what came.
        place: which in its request it is.
        wants_episode: the reward asks for `step_data`.
    """
    episode, failure = None, None
    if wants_episode and body.episode is not None:
        try:
            with boundary(EpisodeError, "the episode cannot be read"):
                episode = episode_from_record(body.episode)
        except RewardKitError as error:
            failure = Failure("refused", type(error).__name__, str(error))
    turns = body.assistant_turns
    if turns is None:
        turns = [index for index, message in enumerate(body.messages) if message.role == "assistant"]
    return ScoringRequest(
        rollout_id=body.rollout_id if body.rollout_id is not None else str(place),
        messages=body.messages,
        ground_truth=body.ground_truth,
        assistant_turns=turns,
        sample=body.sample,
        environment_return=body.environment_return,
        stop_reason=body.stop_reason,
        final_state=StateSnapshot(body.state.kind, base64.b64decode(body.state.payload)) if body.state else None,
        failure=failure,
        episode=episode,
        extra=body.extra,
    )


def rollout_of(request: ScoringRequest, wanted: frozenset[str] | None) -> dict[str, Any]:
    """What is sent of a rollout: what the reward names, typed.

    Args:
        request: the rollout.
        wanted: the parameters of the reward; None for any.

    Raises:
        EpisodeError: a value has no JSON form.
    """
    names = request.names(wanted) | _ALWAYS
    told: dict[str, Any] = {
        "messages": [to_json_value(message.to_chat()) for message in request.messages],
        "rollout_id": to_json_value(request.rollout_id),
        "assistant_turns": [int(turn) for turn in request.assistant_turns],
    }
    for name in sorted(names & {*_OWN_FIELDS}):
        if (value := getattr(request, name)) is not None and name not in request.extra:
            told[name] = to_json_value(dict(value) if name == "sample" else value)
    if "state" in names and (state := state_record(request)) is not None:
        told["state"] = state
    if "step_data" in names and (episode := steps_record(request)) is not None:
        told["episode"] = episode
    if extra := {name: to_json_value(request.extra[name]) for name in names & request.extra.keys()}:
        told["extra"] = extra
    return told


def answer_of(scored: Scored, codec: Codec) -> dict[str, Any]:
    """What is told of a score; `AnswerBody` describes it.

    A step whose index has no end of digits, which nobody could read, leaves its own rollout unscored.
    """
    if any(isinstance(index, int) and index.bit_length() > _MOST_BITS for index in _step_indexes(scored)):
        told = f"step_outputs: a step_index of more than {_MOST_BITS} bits"
        scored = replace(scored, result=None, failure=Failure("invalid_result", "RewardError", told))
    result = scored.result
    answer = {
        "rollout_id": scored.rollout_id,
        "score": scored.score,
        "result": None if result is None else result.model_dump(include=_OF_RESULT),
        "error": scored.failure.to_json() if scored.failure else None,
        "duration_s": max(0.0, scored.duration_s),
        "sandbox": dict(scored.sandbox) if scored.sandbox else None,
        "stdout": scored.stdout,
        "stderr": scored.stderr,
        "is_output_cut": scored.is_output_cut,
        "retry_after_s": scored.retry_after_s,
    }
    return {key: to_json_value(value) for key, value in answer.items()} if codec == "typed" else answer


def _step_indexes(scored: Scored) -> list[int | str]:
    steps = scored.result.step_outputs if scored.result is not None else None
    return [step.step_index for step in steps or ()]


def scored_of(answer: Any, rollout_id: str, duration_s: float) -> Scored:
    """The score that a server tells with `codec: typed`, under the rollout's own name.

    Raises:
        EpisodeError: a value is not coded.
        pydantic.ValidationError: it is no `AnswerBody`.
        ValueError: it is about another rollout, or has neither a score nor an error.
    """
    told = AnswerBody.model_validate(from_json_value(answer), strict=True)
    if told.rollout_id != rollout_id:
        raise ValueError(f"the score of {told.rollout_id!r} in the place of that of {rollout_id!r}")
    if told.error is None and (told.result is None or told.score != told.result.score):
        raise ValueError(f"neither a score nor an error for {rollout_id!r}")
    failure = told.error.failure() if told.error is not None else None
    output = (told.stdout, told.stderr, told.is_output_cut)
    return Scored(rollout_id, told.result, failure, duration_s, told.sandbox, *output, told.retry_after_s)


def problems_in(error: pydantic.ValidationError, place: str = "") -> str:
    """What is wrong with a body, by field; values are shown where they are short.

    Args:
        error: what pydantic raised.
        place: put before each field, such as "rollouts.3.".
    """
    found = error.errors(include_url=False)
    lines = [_problem(problem, place) for problem in found[:_MOST_PROBLEMS]]
    more = len(found) - len(lines)
    return "; ".join([*lines, *([f"and {more} more"] if more else [])])


def _problem(problem: Any, place: str) -> str:
    field = place + ".".join(map(str, problem["loc"])) or "(top level)"
    if problem["type"] == "extra_forbidden":
        return f"{field}: unknown key"
    if problem["type"] == "missing":
        return f"{field}: missing"
    value = problem["input"]
    is_plain = value is None or isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 200)
    shown = repr(value) if is_plain else repr(value[:60]) if isinstance(value, str) else kind_of(value)
    return f"{field}: {problem['msg'].removeprefix('Value error, ')} (got {shown})"


KEY_VARIABLE = "REWARD_KIT_REWARD_API_KEY"

"""The environment variable that holds the key for rewards behind HTTP."""

_ADDRESS = re.compile(r"https?://[^/?#@\s]+(/[^?#\s]*)?/v1/rewards/[A-Za-z0-9._-]+\Z")

_EXAMPLE = "http://127.0.0.1:8700/v1/rewards/exact"

_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_REFUSED = frozenset({400, 404, 405, 406, 411, 413, 414, 415, 422, 431})


def is_address(reference: str) -> bool:
    """Whether a reference to a reward is a URL."""
    return reference.startswith(("http://", "https://"))


def checked_address(url: str) -> str:
    """The URL of a reward, without a slash at its end.

    Raises:
        ConfigError: it is none; a URL that may hold a credential is not shown.
    """
    if "@" in url:
        raise ConfigError(f"the URL of a reward holds no user name and no password; set {KEY_VARIABLE} instead")
    found = url.rstrip("/")
    try:
        is_right = bool(_ADDRESS.match(found)) and urlsplit(found).port != 0
    except ValueError:
        is_right = False
    if not is_right:
        if found != (shown := re.split("[?#]", found)[0]):  # what follows may be a key too
            raise ConfigError(f"{shown + '…'!r} is no reward's address; nothing follows its path")
        near = found.removesuffix("/score").removesuffix("/score_batch")
        told = f"name {near}" if near != found and _ADDRESS.match(near) else "it looks like " + _EXAMPLE
        raise ConfigError(f"{url!r} is no reward's address; {told}")
    return found


def goes_unencrypted(url: str) -> bool:
    """Whether what is sent there can be read on the way."""
    return urlsplit(url).scheme == "http" and not _is_here(url)


def _is_here(url: str) -> bool:
    return urlsplit(url).hostname in _LOOPBACK


def check_named_by_file(url: str) -> None:
    """Refuse to send the key where a file alone says so: the file may be somebody else's (`providers/keys.py`).

    Raises:
        ConfigError: the key is not configured for that server.
    """
    url = checked_address(url)
    if _key():
        check_allowed(KEY_VARIABLE, url, os.environ)


def _key() -> str:
    """The key: of the environment, else of the nearest `.env`."""
    return (os.environ.get(KEY_VARIABLE) or read_dotenv(Path.cwd()).get(KEY_VARIABLE, "")).strip()


def key_for(url: str, api_key: str | None = None) -> str:
    """The key for a server: as given, else of the environment, else of the nearest `.env`.

    Raises:
        ConfigError: there is none, or no HTTP header can carry it.
    """
    key = (api_key or _key()).strip()
    if not key:
        raise ConfigError(f"no key for {url}: set {KEY_VARIABLE} in the environment or in a .env file")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"the key for {url} ({KEY_VARIABLE}) holds characters that no HTTP header can carry")
    return key


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a reward server, and how often to ask it.

    Attributes:
        timeout_s: for one attempt, from its begin to the last byte of the answer.
        connect_timeout_s: for a connection.
        policy: attempts, where the server could not be reached or wants less or failed (408, 409, 429, 500, 502 to
            504), and the waits between them: on top of what it asks for with Retry-After. An attempt that took
            `timeout_s` is not made again.

    Raises:
        ConfigError: a time is no positive number.
    """

    timeout_s: float = 660.0
    connect_timeout_s: float = 10.0
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        check_number("timeout_s", self.timeout_s)
        check_number("connect_timeout_s", self.connect_timeout_s)
        check_number("max_attempts", self.policy.max_attempts, whole=True)
        check_number("budget_s", self.policy.budget_s)


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class RewardEndpoint:
    """One reward's address, asked over kept-alive connections. Use it as an async context manager.

    Args:
        url: as `checked_address` gives it.
        key: sent with each request, and shown in no message.
        patience: timeouts and attempts.
    """

    def __init__(self, url: str, key: str, patience: Patience) -> None:
        self.url = url
        self._key, self._patience = key, patience
        self._jitter = random.Random()
        self._session: aiohttp.ClientSession | None = None

    def another(self) -> RewardEndpoint:
        """One with connections of its own."""
        return RewardEndpoint(self.url, self._key, self._patience)

    async def __aenter__(self) -> Self:
        import aiohttp

        self._session = aiohttp.ClientSession(
            # How many are in flight is up to the reward agent.
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=self._patience.timeout_s, sock_connect=self._patience.connect_timeout_s
            ),
            # Compressed, a small answer could be of any size.
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

    async def get(self) -> Any:
        """What the server says of the reward. Raises as `post`."""
        return await self._asked("GET", self.url, None)

    async def post(self, action: str, body: bytes) -> Any:
        """What it answers to a JSON body.

        Args:
            action: "score" or "score_batch".
            body: JSON.

        Raises:
            ConfigError: it refuses the request, or the key.
            ProviderError: it cannot be reached, is overloaded or answers something else, also when asked again.
            DeadlineError: it did not answer in time.
        """
        return await self._asked("POST", f"{self.url}/{action}", body)

    async def _asked(self, method: str, url: str, body: bytes | None) -> Any:
        async def attempt() -> Any:
            return self._value_of(await self._exchange(method, url, body), url)

        value, _ = await with_retries(attempt, self._patience.policy, self._jitter)
        return value

    async def _exchange(self, method: str, url: str, body: bytes | None) -> _Answer:
        import aiohttp

        assert self._session is not None, "it is used inside of its block"
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            ) as response:
                return _Answer(response.status, response.headers, await read_body(response, REWARD_ANSWER_BYTES))
        except TooLargeError as error:
            raise ProviderError(f"{url}: the answer has more than {error}, which is the limit") from None
        except aiohttp.ConnectionTimeoutError as error:
            raise UnreachableError(f"{url}: no connection within {self._patience.connect_timeout_s:g} s") from error
        except TimeoutError as error:
            raise DeadlineError(f"{url} did not answer within timeout_s={self._patience.timeout_s:g}") from error
        except (aiohttp.InvalidURL, aiohttp.ClientSSLError) as error:
            raise ProviderError(f"{url} cannot be talked to: {self._told(error)}") from error
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(
                f"{url} refused the connection; is the server running? {error.os_error.strerror or error.os_error}"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(f"{url} dropped the connection: {self._told(error)}") from error

    def _told(self, error: Exception) -> str:
        return excerpt(str(error) or type(error).__name__, [self._key])

    def _value_of(self, answer: _Answer, url: str) -> Any:
        status, headers, body = answer
        if status == 200:
            try:
                return read_strictly(body)
            except (ValueError, RecursionError) as error:
                raise TransientError(f"{url} answered something that is not JSON: {self._told(error)}") from None
        if 300 <= status < 400:
            raise ConfigError(f"{url} redirects (HTTP {status}); name the address that it leads to")
        problem = status_error(status, headers, body, url, [self._key])
        if status in (401, 403):
            raise ConfigError(f"{problem}; is {KEY_VARIABLE} the server's key?")
        if status in _REFUSED:
            raise ConfigError(str(problem))
        raise problem


logger = logging.getLogger("reward_kit.reward_agent")


class RemoteReward:
    """One reward of a reward server: what is known of it, and the scorer that asks it.

    Make it with `RemoteReward.at`, or have `load_reward` make it. It is opened as an async context manager, which the
    reward agent does; `scorer` gives one more of it.

    Args:
        url: its address, such as "https://rewards.example:8700/v1/rewards/exact".
        about: what the server says of it.
        api_key: by default `REWARD_KIT_REWARD_API_KEY`, of the environment or `.env`.
        patience: timeouts and attempts.

    Raises:
        ConfigError: the URL is no reward's, or there is no key.
    """

    def __init__(
        self, url: str, about: AboutBody, *, api_key: str | None = None, patience: Patience | None = None
    ) -> None:
        self.url, self.about = checked_address(url), about
        self._endpoint = RewardEndpoint(self.url, key_for(self.url, api_key), patience or Patience())
        self._deadline_s: float | None = None

    @classmethod
    async def at(cls, url: str, *, api_key: str | None = None, patience: Patience | None = None) -> Self:
        """The reward at an address, once the server has said what it is.

        Args:
            url: its address.
            api_key: by default `REWARD_KIT_REWARD_API_KEY`, of the environment or `.env`.
            patience: timeouts and attempts.

        Raises:
            ConfigError: the URL is no reward's, there is no key, or the server does not know one of them.
            ProviderError: it cannot be reached, or is no reward server.
            DeadlineError: it does not answer.
        """
        url = checked_address(url)
        async with RewardEndpoint(url, key_for(url, api_key), patience or Patience()) as endpoint:
            told = await endpoint.get()
        try:
            about = AboutBody.model_validate(told, strict=True)
        except pydantic.ValidationError as error:
            problems = "; ".join(describe_validation_error(error)[:3])
            raise ProviderError(f"{url} is no reward of a reward server: {problems}") from None
        return cls(url, about, api_key=api_key, patience=patience)

    @property
    def id(self) -> str:
        """Names the reward in files."""
        return self.about.id

    @property
    def mode(self) -> Mode:
        """Whether it scores rollouts one by one or groups of them."""
        return self.about.mode

    @property
    def origin(self) -> Origin | None:
        """None: its file is not here."""
        return None

    @property
    def requirements(self) -> tuple[str, ...]:
        """None: what it requires is installed there."""
        return ()

    @property
    def resources(self) -> Mapping[str, Any]:
        """None that are known here."""
        return {}

    @property
    def options(self) -> Mapping[str, Any]:
        """None: they are fixed there, and part of `digest`."""
        return {}

    @property
    def parameters(self) -> frozenset[str] | None:
        """The names it takes; None where it takes any."""
        return None if self.about.parameters is None else frozenset(self.about.parameters)

    @property
    def required(self) -> frozenset[str]:
        """Those of them that have no default, and that a rollout has."""
        return frozenset(self.about.required)

    @property
    def digest(self) -> str:
        """What the server says decides its scores: other where its code or its options are."""
        return self.about.digest

    def scorer(self, deadline_s: float | None = None) -> RemoteReward:
        """Another one that can be opened beside this.

        Args:
            deadline_s: for one call, its retries included; what exceeds it is unscored with the class `timeout`.
        """
        if deadline_s is not None:
            check_number("deadline_s", deadline_s)
        other = copy.copy(self)
        other._endpoint, other._deadline_s = self._endpoint.another(), deadline_s
        return other

    async def __aenter__(self) -> Self:
        await self._endpoint.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._endpoint.__aexit__(kind, error, trace)

    async def score(self, request: ScoringRequest) -> Scored:
        """As `Scorer`. A rollout that broke is not sent: its failure is the answer."""
        if request.failure is not None:
            return Scored(request.rollout_id, None, request.failure)
        return (await self._scored([request], "score"))[0]

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """As `Scorer`: one request for all that did not break, or several where the rewards are pointwise and many."""
        return await scored_together(requests, self._score_whole)

    async def _score_whole(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        # A group that is too large for the server is refused there; where each is scored by itself it can be cut.
        size = len(requests) if self.mode == "batch" else self.about.max_batch
        parts = [requests[start : start + size] for start in range(0, len(requests), size)]
        return [scored for part in parts for scored in await self._scored(part, "score_batch")]

    async def _scored(self, requests: Sequence[ScoringRequest], action: str) -> list[Scored]:
        began = time.perf_counter()
        try:
            with boundary(RewardError, f"reward {self.id!r} at {self.url}"):
                told = await self._told(requests, action)
                return self._read(told, requests, action, time.perf_counter() - began)
        except RewardKitError as error:
            failure, asked_s = failure_of(error)
            duration_s = time.perf_counter() - began
        logger.info("%d episodes cannot be scored: %s", len(requests), failure.message)
        return [Scored(one.rollout_id, None, failure, duration_s, retry_after_s=asked_s) for one in requests]

    async def _told(self, requests: Sequence[ScoringRequest], action: str) -> Any:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._endpoint.post(action, self._body(requests, action))
        except TimeoutError:
            raise DeadlineError(f"reward {self.id!r} at {self.url} took longer than its {self._deadline_s} s") from None

    def _body(self, requests: Sequence[ScoringRequest], action: str) -> bytes:
        rollouts = [rollout_of(request, self.parameters) for request in requests]
        body = rollouts[0] if action == "score" else {"rollouts": rollouts}
        return json.dumps({**body, "codec": "typed"}, allow_nan=False, separators=(",", ":")).encode("ascii")

    def _read(self, told: Any, requests: Sequence[ScoringRequest], action: str, duration_s: float) -> list[Scored]:
        """The scores that the server told.

        Raises:
            ProviderError: they are not those that were asked for.
        """
        answers = [told] if action == "score" else told.get("scores") if isinstance(told, Mapping) else None
        if not isinstance(answers, list) or len(answers) != len(requests):
            raise ProviderError(f"{self.url} answered something else than {len(requests)} scores")
        try:
            pairs = zip(requests, answers, strict=True)
            return [scored_of(answer, request.rollout_id, duration_s) for request, answer in pairs]
        except pydantic.ValidationError as error:
            problem = "; ".join(describe_validation_error(error)[:3])
        except (ValueError, KeyError, TypeError, EpisodeError) as error:
            problem = str(error)
        raise ProviderError(f"{self.url} answered something that is no score: {problem}")


def notes_on(reward: RemoteReward) -> tuple[str, ...]:
    """Lines for the user."""
    if not goes_unencrypted(reward.url):
        return ()
    return (f"reward {reward.id!r}: rollouts and the key go to {reward.url} unencrypted; use https",)

"""The endpoint of a judge: its options, one client per judge and worker, kept answers, and what they cost.

1. A request that was answered is not made again: not by this worker, and not by a later run with the same cache file.
   Equal requests at the same time are one. Only readable answers are kept.
2. An unreadable verdict is asked for once more, with another seed.
3. Whatever leaves no verdict is a `ProviderError`: the rollout is unscored, and never scored 0.
4. With a recording (`--record`, `--replay`) every distinct request is in it once, so the cache file is not used.

The cache file has JSON lines: a header, then one line an answer, under the SHA-256 of the endpoint and the whole
request. Lines are only appended, so several runs may share it; a torn line of a killed run is skipped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, field_validator

from reward_kit.errors import ConfigError, DeadlineError, ProviderError, RewardKitError, why_unreadable
from reward_kit.models import MetricResult
from reward_kit.private_files import private_opener
from reward_kit.providers.chat import ChatEndpoint
from reward_kit.providers.prices import load_prices
from reward_kit.providers.request_queue import Rates, RetryPolicy
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, ProviderSession, endpoint_for
from reward_kit.rewards.judge_questions import Question, UnreadableVerdict, prompt_of, verdict_of
from reward_kit.validation import describe_validation_error

AnswerForm = Literal["auto", "json_schema", "json_object", "text"]
_OWN_KEYS = frozenset({"model", "messages", "stream", "stream_options", "seed", "response_format", "n"})


class ClientOptions(BaseModel):
    """How the endpoint of a judge is asked.

    Attributes:
        api_key_env: name of the variable that holds the key; by default OPENAI_API_KEY.
        temperature: None sends none, for models that take no other than their own.
        max_tokens: of one verdict; None sends no limit.
        seed: of the first vote, counted up for the others; None sends none.
        answer_form: "json_schema" or "json_object" asks for structured output, "text" tells the form in words only;
            "auto" asks for a schema, and does without where the endpoint refuses it.
        total_timeout_s: seconds for one attempt.
        max_attempts: attempts at one request, the first included.
        retry_budget_s: seconds from the first attempt after which no further one begins.
        retry_base_s: upper bound in seconds of the first random wait between attempts.
        price_file: US dollars per million tokens; see `providers/prices.py`.
        requests_per_minute: attempts that may begin in a minute.
        tokens_per_minute: tokens of prompts and answers in a minute.
        max_connections: requests in flight.
        extra_body: further keys of each request.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_key_env: str | None = None
    temperature: float | None = Field(default=0.0, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=0, ge=0)
    answer_form: AnswerForm = "auto"
    total_timeout_s: float = Field(default=120.0, gt=0)
    max_attempts: int = Field(default=5, ge=1)
    retry_budget_s: float = Field(default=300.0, gt=0)
    retry_base_s: float = Field(default=0.5, gt=0)
    price_file: str | None = None
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)
    max_connections: int | None = Field(default=None, ge=1)
    extra_body: dict[str, Any] = Field(default_factory=dict)

    @field_validator("extra_body")
    @classmethod
    def _leaves_ours_alone(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(extra.keys() & _OWN_KEYS):
            raise ValueError(f"{taken[0]!r} belongs to the judge and cannot be set here")
        return extra


def client_options(given: ClientOptions | dict[str, Any] | None) -> ClientOptions:
    """The options, also from the plain mapping that a call by hand gives.

    Raises:
        ConfigError: an option is unknown or wrong.
    """
    try:
        return ClientOptions.model_validate({} if given is None else given)
    except pydantic.ValidationError as error:
        problems = "; ".join(describe_validation_error(error, ClientOptions))
        raise ConfigError(f"judge, option client: {problems}") from None


@dataclass(slots=True)
class JudgeUsage:
    """Adds up over the requests of one score.

    Attributes:
        calls: requests that were answered over the network, or from a recording.
        cached: answers that were known already; they take nothing.
        prompt_tokens: None once an endpoint has not said how many.
        completion_tokens: likewise.
        cost: US dollars; None once a price is not known.
    """

    calls: int = 0
    cached: int = 0
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    cost: float | None = 0.0

    def add_call(self, prompt_tokens: int | None, completion_tokens: int | None, cost: float | None) -> None:
        """One more answered request."""
        self.calls += 1
        self.prompt_tokens = _sum(self.prompt_tokens, prompt_tokens)
        self.completion_tokens = _sum(self.completion_tokens, completion_tokens)
        self.cost = None if self.cost is None or cost is None else self.cost + cost

    def as_metric(self) -> MetricResult:
        """The figures as `name=value` texts."""
        figures = {
            "calls": self.calls,
            "cached": self.cached,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost_usd": None if self.cost is None else f"{self.cost:.6f}",
        }
        told = (f"{name}={'unknown' if value is None else value}" for name, value in figures.items())
        return MetricResult(score=0.0, is_score_valid=False, reason=" ".join(told))


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


_HEADER = {"judge_cache": 1}
_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What a judge said, and what that took; None where the endpoint does not say."""

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None
    finish_reason: str | None = None


def key_of(url: str, request: Mapping[str, Any]) -> str:
    """The key of a request to an endpoint."""
    canonical = json.dumps([url, request], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


class AnswerCache:
    """Answers by key.

    Args:
        path: the file; None for memory alone.

    Raises:
        ConfigError: the file cannot be read or written, or is no cache.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._known: dict[str, Answer] = {}
        self._path, self._file = path, None if path is None else _open(path)
        if path is not None and self._file is not None:
            with ExitStack() as undo:
                undo.callback(self._file.close)
                self._read(path, self._file)
                undo.pop_all()

    def get(self, key: str) -> Answer | None:
        """The answer, None where it is not known."""
        return self._known.get(key)

    def keep(self, key: str, answer: Answer) -> None:
        """Keep an answer; one that is known stays."""
        if key in self._known:
            return
        self._known[key] = answer
        self._append({"key": key, **answer._asdict()})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, path: Path, file: IO[bytes]) -> None:
        file.seek(0)
        lines = file.read().split(b"\n")
        if lines == [b""]:
            self._append(_HEADER)
            return
        if _parsed(lines[0]) != _HEADER:
            raise ConfigError(
                f"{path} is not a cache of a judge: its first line is {lines[0][:80]!r}; name another file"
            )
        for line in lines[1:]:
            entry = _parsed(line)
            if isinstance(entry, dict) and isinstance(entry.get("key"), str) and isinstance(entry.get("text"), str):
                others = (entry.get(name) for name in Answer._fields[1:])
                self._known.setdefault(entry["key"], Answer(entry["text"], *others))
            elif line:
                _log.warning("%s: a torn line is passed over", path)
        if lines[-1]:
            file.write(b"\n")

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n")
        except OSError as error:  # the answer is there all the same
            _log.warning("%s takes no more answers: %s", self._path, error.strerror)
            self.close()


def _open(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line is one write, so that lines of several writers do not mix.
        return open(path, "a+b", buffering=0, opener=private_opener)
    except OSError as error:
        raise ConfigError(f"cache {path} cannot be written: {why_unreadable(path, error)}") from error


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


SCOPE = "judge"
"""Under which a recording keeps what judges are asked: their requests are told apart by what they say alone."""
T = TypeVar("T")
_REFUSED_FORM = re.compile(r"answered HTTP (?:400|422|501)\b")
_RETRY_SEEDS = 10_000
_CUT = {"length": "it was cut off at its limit of tokens", "content_filter": "it was withheld by a content filter"}


class JudgeClients:
    """The judges of one worker: opened when they are first asked, closed together."""

    asks_models = True

    def __init__(self) -> None:
        self._clients: dict[tuple[Any, ...], JudgeClient] = {}
        self._caches: dict[Path | None, AnswerCache] = {}

    def client(
        self, model: str, base_url: str | None, cache: str | None, options: ClientOptions | dict[str, Any] | None
    ) -> JudgeClient:
        """The client for these options; equal ones give the same.

        Raises:
            ConfigError: an option is wrong, a key is missing, or a file cannot be read.
        """
        if not isinstance(model, str) or not model:
            raise ConfigError(f"judge, option model: expected the model's name at the endpoint, got {model!r:.80}")
        chosen, traffic = client_options(options), CURRENT_PROVIDER_SESSION.get()
        key = (model, base_url, cache, chosen.model_dump_json(), id(traffic))
        if key not in self._clients:
            self._clients[key] = JudgeClient(model, base_url, self._cache(cache), chosen, traffic)
        return self._clients[key]

    @classmethod
    async def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse what could score nothing, before the first rollout.

        Raises:
            ConfigError: an option is wrong, or a key is missing.
        """
        if "model" in options:
            clients = cls()
            try:
                clients.client(options["model"], options.get("base_url"), None, options.get("client"))
            finally:
                await clients.close()

    async def close(self) -> None:
        """Close all connections and files."""
        for client in self._clients.values():
            await client.close()
        for cache in self._caches.values():
            cache.close()
        self._clients.clear()
        self._caches.clear()

    def _cache(self, path: str | None) -> AnswerCache:
        place = None if path is None else Path(path).resolve()
        if place not in self._caches:
            self._caches[place] = AnswerCache(place)
        return self._caches[place]


@asynccontextmanager
async def borrowed(clients: JudgeClients | None) -> AsyncIterator[JudgeClients]:
    """The worker's clients; for a call by hand ones of its own, which are closed again."""
    if clients is not None:
        yield clients
        return
    own = JudgeClients()
    try:
        yield own
    finally:
        await own.close()


async def together(*asked: Awaitable[T]) -> list[T]:
    """What all of them return. Where one fails the others end first, so that nothing is in flight when it is raised."""
    results = await asyncio.gather(*asked, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


class JudgeClient:
    """One judge.

    Args:
        model: its name at the endpoint.
        base_url: by default OPENAI_BASE_URL, else OpenAI's own.
        cache: where answers are kept.
        options: how the endpoint is asked.
        traffic: what the requests of a run share; None outside of one.

    Raises:
        ConfigError: a key is missing, or the price file cannot be read.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None,
        cache: AnswerCache,
        options: ClientOptions,
        traffic: ProviderSession | None,
    ) -> None:
        settings = endpoint_for(traffic, base_url, None, options.api_key_env)
        self._model, self._options, self._url = model, options, settings.base_url
        self._cache = AnswerCache() if traffic is not None and traffic.cassette is not None else cache
        self._is_schema_refused = False
        self._pending: dict[str, asyncio.Future[Answer]] = {}
        self._endpoint = ChatEndpoint(
            settings.base_url,
            settings.api_key,
            idle_timeout_s=options.total_timeout_s,
            total_timeout_s=options.total_timeout_s,
            retry=RetryPolicy(options.max_attempts, options.retry_budget_s, options.retry_base_s),
            prices=load_prices(options.price_file) if options.price_file is not None else None,
            traffic=traffic,
            rates=Rates(options.requests_per_minute, options.tokens_per_minute, options.max_connections),
            no_key=settings.no_key,
        )

    def __repr__(self) -> str:
        return f"JudgeClient({self._model!r}, {self._url!r})"

    async def ask(self, question: Question, usage: JudgeUsage, votes: int = 1) -> list[dict[str, Any]]:
        """The verdicts of a question: one a vote, without those that could not be had while they are the fewer.

        Raises:
            ProviderError: half of the votes or more failed; the first failure is raised.
            LimitError: the data does not fit the model.
        """
        seed = self._options.seed
        if votes > 1 and seed is None:
            raise ConfigError("judge, option client.seed: several votes need a seed, or all would be one")
        asked = [self._vote(question, None if seed is None else seed + vote, usage) for vote in range(votes)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, RewardKitError) or 2 * len(failures) >= votes:
                raise failure
        return [result for result in results if not isinstance(result, BaseException)]

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.aclose()

    async def _vote(self, question: Question, seed: int | None, usage: JudgeUsage) -> dict[str, Any]:
        try:
            return await self._verdict(question, seed, usage, again=False)
        except UnreadableVerdict:
            again = None if seed is None else seed + _RETRY_SEEDS
        try:
            return await self._verdict(question, again, usage, again=True)
        except UnreadableVerdict as error:
            raise ProviderError(f"judge {self._model!r} at {self._url} gave no readable verdict: {error}") from None

    async def _verdict(self, question: Question, seed: int | None, usage: JudgeUsage, *, again: bool) -> dict[str, Any]:
        """One answer, read, and kept where it can be."""
        prompt, options = prompt_of(question, again=again), self._options
        given = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": seed}
        request: dict[str, Any] = {"model": self._model, "messages": prompt.messages, **options.extra_body}
        request.update({name: value for name, value in given.items() if value is not None})
        if options.answer_form in ("auto", "json_schema"):
            schema = {"name": question.name, "strict": True, "schema": question.whole_form.schema()}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif options.answer_form == "json_object":
            request["response_format"] = {"type": "json_object"}
        key = key_of(self._url, request)
        answer, is_known = await self._answer(key, request)
        if is_known:
            usage.cached += 1
        else:
            usage.add_call(answer.prompt_tokens, answer.completion_tokens, answer.cost)
        if problem := _CUT.get(answer.finish_reason or ""):
            raise UnreadableVerdict(problem)
        verdict = verdict_of(answer.text, question, prompt.code)
        self._cache.keep(key, answer)
        return verdict

    async def _answer(self, key: str, request: Mapping[str, Any]) -> tuple[Answer, bool]:
        """The answer to a request and whether it is a known one, or the one that another score is waiting for."""
        while True:
            if (known := self._cache.get(key)) is not None:
                return known, True
            if (pending := self._pending.get(key)) is None:
                break
            await asyncio.wait([pending])
            if not pending.cancelled():  # else it has to be asked again
                return pending.result(), True
        answered = self._pending[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._complete(request)
            answered.set_result(answer)
        except Exception as error:
            answered.set_exception(error)
            answered.exception()  # it is raised here, whether or not another score waits for it
            raise
        finally:
            answered.cancel()
            del self._pending[key]
        return answer, False

    async def _complete(self, request: Mapping[str, Any]) -> Answer:
        without = {name: value for name, value in request.items() if name != "response_format"}
        is_auto = self._options.answer_form == "auto"
        try:
            return await self._send(without if is_auto and self._is_schema_refused else request)
        except ProviderError as error:
            if not is_auto or self._is_schema_refused or not _REFUSED_FORM.search(str(error)):
                raise
        answer = await self._send(without)
        self._is_schema_refused = True
        return answer

    async def _send(self, request: Mapping[str, Any]) -> Answer:
        try:
            completion = await self._endpoint.complete(request, scope=SCOPE)
        except DeadlineError as error:  # it is the endpoint that was slow, and not the reward
            raise ProviderError(f"judge {self._model!r}: {error}") from error
        usage, text = completion.usage, completion.message.text
        if usage is None:
            return Answer(text, finish_reason=completion.finish_reason)
        tokens = (usage.prompt_tokens, usage.completion_tokens)
        return Answer(text, *tokens, usage.cost, completion.finish_reason)

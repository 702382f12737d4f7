"""The judge client, its options, its response cache, and the cost of its requests.

1. A request that was answered is never sent again, either by the same worker or by a later run that uses the same cache
   file. Identical concurrent requests are sent only once. Only responses that can be parsed are cached.
2. If a verdict cannot be parsed, it is requested once more with a different seed.
3. If there is still no verdict, a `ProviderError` is raised. The rollout is then unscored; it never scores 0.
4. A recording (`--record`, `--replay`) contains every distinct request once, so the cache file is not used during
   recording or replay.

The cache file is in the JSON Lines format. It contains a header followed by one line for each response. A response's
key is the SHA-256 hash of the endpoint and the full request. Lines are only appended, so multiple runs can share the
file. An incomplete line left by a killed run is skipped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, field_validator

from reward_kit.errors import ConfigError, DeadlineError, ProviderError, RewardKitError, describe_read_error
from reward_kit.models import MetricResult
from reward_kit.private_files import private_opener
from reward_kit.providers.chat import DIALECTS, ChatEndpoint
from reward_kit.providers.dialect import Dialect
from reward_kit.providers.keys import complete_model, intended_model
from reward_kit.providers.model_calls import MODEL_CALLS
from reward_kit.providers.prices import load_prices
from reward_kit.providers.request_queue import Rates, RetryPolicy
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, ProviderSession, endpoint_for
from reward_kit.rewards.judge_prompts import Question, UnreadableVerdict, form_schema, prompt_hash
from reward_kit.safe_input import complete_lines
from reward_kit.validation import describe_validation_error

AnswerForm = Literal["auto", "json_schema", "json_object", "text"]
SCOPE = "judge"
"""The scope of judge requests in a recording. Within this scope, requests are identified only by their content."""
T = TypeVar("T")
_OWN_KEYS = frozenset({"model", "messages", "stream", "stream_options", "seed", "response_format", "n"})


class ClientOptions(BaseModel):
    """Options for requests to a judge's endpoint.

    Attributes:
        api: "chat" for chat completions, "responses" for OpenAI's Responses API, or "messages" for Anthropic's Messages
            API. If None, the API of the provider in `model` is used, or "chat" if `model` names no provider.
        api_key_env: the environment variable that contains the API key. If None, the variable of the provider in
            `model` is used, or OPENAI_API_KEY if `model` names no provider.
        temperature: the sampling temperature. If None, no temperature is sent. If this option is not set and the
            endpoint rejects the default, 0, the endpoint's default applies.
        max_tokens: the maximum number of tokens in a verdict. If None, no limit is sent.
        seed: the random seed for the first vote. The seed increases by 1 for each further vote. If None, no seed is
            sent. Only the API "chat" supports seeds.
        answer_form: "json_schema" or "json_object" to request structured output, "text" to describe the form only in
            words, or "auto" to request a schema and fall back to text if the endpoint rejects the schema. "json_object"
            has no effect with the API "messages".
        total_timeout_s: the time limit for each attempt, in seconds.
        max_attempts: the maximum number of attempts for each request, including the first.
        retry_budget_s: the number of seconds after the first attempt during which further attempts may start.
        retry_base_s: the upper bound of the first random wait between attempts, in seconds.
        price_file: a file with prices in US dollars per million tokens; see `providers/prices.py`. If None, the cost is
            unknown.
        requests_per_minute: the maximum number of attempts per minute. None means unlimited.
        tokens_per_minute: the maximum number of prompt and completion tokens per minute. None means unlimited.
        max_connections: the maximum number of concurrent requests. None means unlimited.
        extra_body: additional fields to include in each request.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    api: Literal["chat", "responses", "messages"] | None = None
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
    def _check_own_keys(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(extra.keys() & _OWN_KEYS):
            raise ValueError(f"{taken[0]!r} is set by the judge and cannot be overridden")
        return extra


def client_options(options: ClientOptions | dict[str, Any] | None) -> ClientOptions:
    """Return the client options. A plain mapping, which is allowed in a direct call, is converted.

    Raises:
        ConfigError: If an option is unknown or invalid.
    """
    try:
        return ClientOptions.model_validate({} if options is None else options)
    except pydantic.ValidationError as error:
        problems = "; ".join(describe_validation_error(error, ClientOptions))
        raise ConfigError(f"judge, option client: {problems}") from None


@dataclass(slots=True)
class JudgeUsage:
    """The total usage of all requests for one score.

    Attributes:
        calls: the number of requests that were answered by the endpoint or from a recording.
        cached: the number of responses that were found in the cache and therefore cost nothing.
        prompt_tokens: the number of prompt tokens, or None if an endpoint did not report this number.
        completion_tokens: the number of completion tokens, or None if an endpoint did not report this number.
        cost: the cost in US dollars, or None if a price or token count is unknown.
        reasoning_tokens: the number of completion tokens used for reasoning, as far as the endpoint reported this
            number.
    """

    calls: int = 0
    cached: int = 0
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    cost: float | None = 0.0
    reasoning_tokens: int = 0

    def add_call(self, answer: Answer) -> None:
        """Add the usage of a request that was answered."""

        def add(total: float | None, more: float | None) -> Any:
            return None if total is None or more is None else total + more

        self.calls += 1
        self.prompt_tokens = add(self.prompt_tokens, answer.prompt_tokens)
        self.completion_tokens = add(self.completion_tokens, answer.completion_tokens)
        self.cost = add(self.cost, answer.cost)
        self.reasoning_tokens += answer.reasoning_tokens or 0

    def as_metric(self) -> MetricResult:
        """Return the usage as a metric. The reason of the metric is a list of `name=value` pairs."""
        figures = {
            "calls": self.calls,
            "cached": self.cached,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            **({"reasoning_tokens": self.reasoning_tokens} if self.reasoning_tokens else {}),
            "cost_usd": None if self.cost is None else f"{self.cost:.6f}",
        }
        texts = (f"{name}={'unknown' if value is None else value}" for name, value in figures.items())
        return MetricResult(score=0.0, is_score_valid=False, reason=" ".join(texts))


_HEADER = {"judge_cache": 1}
_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """A judge's response and its usage. A field is `None` if the endpoint did not report it."""

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None
    finish_reason: str | None = None
    reasoning_tokens: int | None = None


class AnswerCache:
    """A cache of responses, optionally stored in a file.

    Args:
        path: the cache file. If None, responses are kept only in memory.

    Raises:
        ConfigError: If the file cannot be read or written, or is not a cache.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._known: dict[str, Answer] = {}
        self._path = path
        self._file: IO[bytes] | None = None
        if path is None:
            return
        with ExitStack() as undo:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Write each line with a single call so that the lines of multiple writers do not mix.
                self._file = undo.enter_context(open(path, "a+b", buffering=0, opener=private_opener))
                self._read(path, self._file)
            except OSError as error:
                raise ConfigError(f"cache {path} cannot be written: {describe_read_error(path, error)}") from error
            undo.pop_all()

    def get(self, key: str) -> Answer | None:
        """Return the cached response, or None if the response is not cached."""
        return self._known.get(key)

    def keep(self, key: str, answer: Answer) -> None:
        """Store a response unless the cache already contains a response for this key."""
        if key not in self._known:
            self._known[key] = answer
            self._append({"key": key, **answer._asdict()})

    def close(self) -> None:
        """Close the cache file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, path: Path, file: IO[bytes]) -> None:
        file.seek(0)
        header = file.readline(80)
        if not header:
            self._append(_HEADER)
            return
        if _parsed(header) != _HEADER:
            raise ConfigError(f"{path} is not a judge cache: its first line is {header!r}; choose a different file")
        end = 0
        for offset, line in complete_lines(path):
            end = offset + len(line)
            entry = _parsed(line)
            if isinstance(entry, dict) and isinstance(entry.get("key"), str) and isinstance(entry.get("text"), str):
                others = (entry.get(name) for name in Answer._fields[1:])
                self._known.setdefault(entry["key"], Answer(entry["text"], *others))
            elif offset and line.strip():
                _log.warning("%s: skipping an incomplete line", path)
        if end < file.seek(0, os.SEEK_END):  # End the incomplete line of a killed writer.
            file.write(b"\n")

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n")
        except OSError as error:  # the response is still used
            _log.warning("%s: cannot write further responses: %s", self._path, error.strerror)
            self.close()


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


_REFUSED = re.compile(r"(?:answered|returned) HTTP (?:400|422|501)\b")
_RETRY_SEEDS = 10_000
_CUT = {"length": "it was truncated at its token limit", "content_filter": "it was withheld by a content filter"}


class JudgeClients:
    """The judge clients of one worker. Each client is opened on first use, and all clients are closed together."""

    asks_models = True

    def __init__(self) -> None:
        self._clients: dict[tuple[Any, ...], JudgeClient] = {}
        self._caches: dict[Path | None, AnswerCache] = {}

    def client(
        self, model: str, base_url: str | None, cache: str | None, options: ClientOptions | dict[str, Any] | None
    ) -> JudgeClient:
        """Return the client for these options. Calls with the same options return the same client.

        Raises:
            ConfigError: If an option is invalid, if an API key is missing, or if a file cannot be read.
        """
        if not isinstance(model, str) or not model:
            raise ConfigError(f"judge, option model: must be the model's name at the endpoint, got {model!r:.80}")
        chosen, traffic = client_options(options), CURRENT_PROVIDER_SESSION.get()
        key = (model, base_url, cache, chosen.model_dump_json(), id(traffic))
        if key not in self._clients:
            path = None if cache is None else Path(cache).resolve()
            if path not in self._caches:
                self._caches[path] = AnswerCache(path)
            self._clients[key] = JudgeClient(model, base_url, self._caches[path], chosen, traffic)
        return self._clients[key]

    @classmethod
    async def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check the options before the first rollout.

        Raises:
            ConfigError: If an option is invalid, or if an API key is missing.
        """
        if "model" in options:
            clients = cls()
            try:
                clients.client(options["model"], options.get("base_url"), None, options.get("client"))
            finally:
                await clients.close()

    @staticmethod
    def unpriced_model(options: Mapping[str, Any]) -> str | None:
        """Return the model that a judge's options select, or None if the model's price is known."""
        if not isinstance(model := options.get("model"), str):
            return None
        name, _ = complete_model(model, {"base_url": options.get("base_url")})
        price_file = client_options(options.get("client")).price_file
        return None if price_file is not None and name in load_prices(price_file).models else name

    async def close(self) -> None:
        """Close all connections and files."""
        for client in self._clients.values():
            await client.close()
        for cache in self._caches.values():
            cache.close()
        self._clients.clear()
        self._caches.clear()


@asynccontextmanager
async def open_judge(
    clients: JudgeClients | None,
    model: str,
    base_url: str | None,
    cache: str | None,
    options: ClientOptions | dict[str, Any] | None,
) -> AsyncIterator[JudgeClient]:
    """Yield one of the worker's clients or, if `clients` is `None` (in a direct call), a temporary client."""
    async with AsyncExitStack() as stack:
        if clients is None:
            clients = JudgeClients()
            stack.push_async_callback(clients.close)
        yield clients.client(model, base_url, cache, options)


async def together(*asked: Awaitable[T]) -> list[T]:
    """Return the results of all awaitables.

    If one of them fails, the error is raised only after the others have finished, so no request remains open.
    """
    results = await asyncio.gather(*asked, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


class JudgeClient:
    """A client of one judge.

    Args:
        model: the name of the model at the endpoint or, without `base_url`, `PROVIDER/NAME`.
        base_url: the URL of the endpoint. If None, the provider's endpoint is used. Without a provider, the URL is
            taken from OPENAI_BASE_URL or, if this variable is not set, OpenAI's endpoint is used.
        cache: the cache for the judge's responses.
        options: the options for the requests.
        traffic: the session shared by all requests in a run, or None without a run.

    Raises:
        ConfigError: If an API key is missing, or if the price file cannot be read.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None,
        cache: AnswerCache,
        options: ClientOptions,
        traffic: ProviderSession | None,
    ) -> None:
        named = {"base_url": base_url, "api": options.api, "api_key_env": options.api_key_env}
        self._model, chosen = complete_model(model, named)
        dialect = DIALECTS[chosen.get("api", "chat")]
        key = chosen.get("api_key_env")
        try:
            settings = endpoint_for(traffic, chosen.get("base_url"), None, key, usual_key=dialect.key_variable)
        except ConfigError as error:
            meant = intended_model(model) if base_url is None else ""
            raise ConfigError(f"{error}; did you mean the model {meant!r}?" if meant else str(error)) from error
        self._options, self._url = options, settings.base_url
        self._cache = AnswerCache() if traffic is not None and traffic.cassette is not None else cache
        self._refused = set() if chosen.get("send_seed", True) else {"seed"}  # keys that the endpoint rejects
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
            dialect=dialect,
        )

    def __repr__(self) -> str:
        return f"JudgeClient({self._model!r}, {self._url!r})"

    async def ask(self, question: Question, usage: JudgeUsage, votes: int = 1) -> list[dict[str, Any]]:
        """Return the verdicts of all votes. If fewer than half of the votes fail, the failed votes are omitted.

        Raises:
            ProviderError: If at least half of the votes fail. The first failure is raised.
            LimitError: If the data does not fit into the model's context.
        """
        seed = self._options.seed
        if votes > 1 and seed is None:
            raise ConfigError(
                "judge, option client.seed: multiple votes require a seed; without one, all votes would be identical"
            )
        asked = [self._vote(question, None if seed is None else seed + vote, usage) for vote in range(votes)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if isinstance(failure, RewardKitError) and usage.calls:
                failure.judge_usage = usage.as_metric().reason
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
            raise ProviderError(
                f"judge {self._model!r} at {self._url} returned no verdict that can be parsed: {error}"
            ) from None

    async def _verdict(self, question: Question, seed: int | None, usage: JudgeUsage, *, again: bool) -> dict[str, Any]:
        """Return the parsed verdict. If the response can be parsed, it is cached."""
        (messages, code), options = question.prompt(again=again), self._options
        given = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": seed}
        request: dict[str, Any] = {"model": self._model, "messages": messages, **options.extra_body}
        request.update({name: value for name, value in given.items() if value is not None})
        if options.answer_form in ("auto", "json_schema"):
            schema = {"name": question.name, "strict": True, "schema": form_schema(question.whole_form)}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif options.answer_form == "json_object":
            request["response_format"] = {"type": "json_object"}
        # The keys of chat completions do not contain the path, so existing cache files remain valid.
        path = self._endpoint.dialect.path.removeprefix(Dialect.path)
        canonical = json.dumps([f"{self._url}{path}", request], sort_keys=True, separators=(",", ":"))
        key = hashlib.sha256(canonical.encode("ascii")).hexdigest()
        answer, is_known = await self._answer(key, request)
        if is_known:
            usage.cached += 1
            self._endpoint.record_cached_call(self._model, prompt_hash(messages[0]["content"]))
        else:
            usage.add_call(answer)
        if problem := _CUT.get(answer.finish_reason or ""):
            raise UnreadableVerdict(problem)
        verdict = question.verdict(answer.text, code)
        self._cache.keep(key, answer)
        return verdict

    async def _answer(self, key: str, request: Mapping[str, Any]) -> tuple[Answer, bool]:
        """Return the response to a request, and whether the cache or an identical concurrent request supplied it."""
        while True:
            if (known := self._cache.get(key)) is not None:
                return known, True
            if (pending := self._pending.get(key)) is None:
                break
            await asyncio.wait([pending])
            if not pending.cancelled():  # Otherwise request it again.
                return pending.result(), True
        future = self._pending[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._complete(request)
            future.set_result(answer)
        except Exception as error:
            future.set_exception(error)
            # Mark the exception as retrieved. The error is raised here even if no other score waits for it.
            future.exception()
            raise
        finally:
            future.cancel()
            del self._pending[key]
        return answer, False

    async def _complete(self, request: Mapping[str, Any]) -> Answer:
        """Return the response to a request. If the endpoint rejects a default, the request is sent again without it."""
        refused = set(self._refused)
        while True:
            sent = {key: value for key, value in request.items() if key not in refused}
            try:
                answer = await self._send(sent)
            except ProviderError as error:
                if (key := self._refused_default(sent, str(error))) is None:
                    raise
                refused.add(key)
            else:
                self._refused |= refused
                return answer

    def _refused_default(self, sent: Mapping[str, Any], error: str) -> str | None:
        """Return a key that the endpoint may have rejected and that the user did not set, or None."""
        if not _REFUSED.search(error):
            return None
        if "temperature" in sent and "temperature" in error and "temperature" not in self._options.model_fields_set:
            return "temperature"
        return "response_format" if "response_format" in sent and self._options.answer_form == "auto" else None

    async def _send(self, request: Mapping[str, Any]) -> Answer:
        try:
            completion = await self._endpoint.complete(request, scope=SCOPE)
        except DeadlineError as error:  # The endpoint was slow, not the reward.
            raise ProviderError(f"judge {self._model!r}: {error}") from error
        if calls := MODEL_CALLS.get():  # the endpoint has just added this call as the last one
            calls[-1].prompt_hash = prompt_hash(request["messages"][0]["content"])
        usage, text = completion.usage, completion.message.text
        if usage is None:
            return Answer(text, finish_reason=completion.finish_reason)
        tokens = (usage.prompt_tokens, usage.completion_tokens)
        return Answer(text, *tokens, usage.cost, completion.finish_reason, usage.reasoning_tokens)

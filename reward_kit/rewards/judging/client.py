"""Who is asked: one client for each judge, its connections shared by all scores of a worker, its answers kept.

1. A request that was answered is not made again: not by this worker, and not by a later run that has the cache file.
   Equal requests at the same time are one. Only what could be read is kept.
2. A verdict that cannot be read is asked for once more, with another seed; after that there is none.
3. Whatever leaves no verdict is a `ProviderError`: the rollout is unscored, and never scored 0.
4. With a recording (`--record`, `--replay`) every distinct request is in it once, so the cache file is not asked.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from reward_kit.errors import ConfigError, DeadlineError, ProviderError, RewardKitError
from reward_kit.providers.chat import ChatEndpoint
from reward_kit.providers.prices import load_prices
from reward_kit.providers.request_queue import Rates, RetryPolicy
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, ProviderSession, endpoint_for
from reward_kit.rewards.judging.cache import Answer, AnswerCache, key_of
from reward_kit.rewards.judging.options import ClientOptions, client_options
from reward_kit.rewards.judging.questions import Question, prompt_of, verdict_of
from reward_kit.rewards.judging.usage import JudgeUsage
from reward_kit.rewards.judging.verdicts import UnreadableVerdict

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


class _Said(NamedTuple):
    answer: Answer
    is_known: bool


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
        prompt = prompt_of(question, again=again)
        request = self._request(prompt.messages, question, seed)
        key = key_of(self._url, request)
        said = await self._said(key, request)
        if said.is_known:
            usage.cached += 1
        else:
            usage.add_call(said.answer.prompt_tokens, said.answer.completion_tokens, said.answer.cost)
        if problem := _CUT.get(said.answer.finish_reason or ""):
            raise UnreadableVerdict(problem)
        verdict = verdict_of(said.answer.text, question, prompt.code)
        self._cache.keep(key, said.answer)
        return verdict

    def _request(self, messages: list[dict[str, str]], question: Question, seed: int | None) -> dict[str, Any]:
        options = self._options
        given = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": seed}
        request: dict[str, Any] = {"model": self._model, "messages": messages, **options.extra_body}
        request.update({name: value for name, value in given.items() if value is not None})
        if options.answer_form in ("auto", "json_schema"):
            schema = {"name": question.name, "strict": True, "schema": question.whole_form.schema()}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif options.answer_form == "json_object":
            request["response_format"] = {"type": "json_object"}
        return request

    async def _said(self, key: str, request: Mapping[str, Any]) -> _Said:
        """The answer to a request: a known one, the one that another score is waiting for, or a new one."""
        while True:
            if (known := self._cache.get(key)) is not None:
                return _Said(known, True)
            if (pending := self._pending.get(key)) is None:
                break
            await asyncio.wait([pending])
            if not pending.cancelled():  # else whoever asked was cancelled, and somebody has to ask again
                return _Said(pending.result(), True)
        answered = self._pending[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._complete(request)
            answered.set_result(answer)
        except Exception as error:
            answered.set_exception(error)
            answered.exception()  # it is raised here; that nobody else waits for it is no mistake
            raise
        finally:
            answered.cancel()
            del self._pending[key]
        return _Said(answer, False)

    async def _complete(self, request: Mapping[str, Any]) -> Answer:
        without = {name: value for name, value in request.items() if name != "response_format"}
        if self._options.answer_form != "auto":
            return await self._send(request)
        if self._is_schema_refused:
            return await self._send(without)
        try:
            return await self._send(request)
        except ProviderError as error:
            if not _REFUSED_FORM.search(str(error)):
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

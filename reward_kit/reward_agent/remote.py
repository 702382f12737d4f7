"""`RemoteReward`: a reward function that runs behind `reward-kit serve`, and is scored with like any other.

It is named by its URL wherever a reward is named: `reward_function_path: http://host:8700/v1/rewards/exact` in a task
file, `--reward https://…` on the command line, `AsyncRewardAgent(await RemoteReward.at("https://…"))` in code. Scores
and failures are those of the same reward in process. What the network adds is retried, and else recorded as a
`provider_error` (not reached, overloaded), a `timeout`, or `refused`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import pydantic

from reward_kit.errors import (
    DeadlineError,
    EpisodeError,
    ProviderError,
    RewardError,
    RewardKitError,
    boundary,
)
from reward_kit.reward_agent.remote_client import (
    Patience,
    RewardEndpoint,
    checked_address,
    goes_unencrypted,
    key_for,
)
from reward_kit.reward_agent.remote_wire import AboutBody, rollout_of, scored_of
from reward_kit.reward_agent.scoring import Scored, ScoringRequest, failure_of, scored_together
from reward_kit.typed_interface import Mode, Origin
from reward_kit.validation import check_number, describe_validation_error

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

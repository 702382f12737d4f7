"""One reward of a reward server: its agent, pending requests, and counters in the text form of Prometheus."""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.errors import ConfigError
from reward_kit.integrations.reward_server.options import ServerOptions, busy
from reward_kit.loading import split_reference
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.confined import ConfinedReward
from reward_kit.reward_agent.levels import SandboxChoice, load_reward, scorer_of
from reward_kit.reward_agent.remote import AboutBody, checked_address
from reward_kit.reward_agent.scoring import Reward, Scored, ScoringRequest
from reward_kit.runs.inputs import scorer_hash

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Labels = Mapping[str, str]


class Histogram:
    """Durations in buckets.

    Attributes:
        count: how many.
        sum: of all, in seconds.
    """

    def __init__(self) -> None:
        self.count, self.sum = 0, 0.0
        self._buckets = [0] * (len(_BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.sum += seconds
        self._buckets[bisect.bisect_left(_BOUNDS, seconds)] += 1

    def samples(self, labels: Labels) -> Iterator[tuple[str, Labels, float]]:
        """As Prometheus has them: each bucket with all that are smaller."""
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), itertools.accumulate(self._buckets), strict=True):
            yield "_bucket", {**labels, "le": bound}, count
        yield "_sum", labels, self.sum
        yield "_count", labels, self.count


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a reward can be called in an address."""
_NAMED = re.compile(rf"({NAME.pattern})=(?!=)(.*)", re.DOTALL)
_LONGEST_WAIT_S = 60.0


class Named(NamedTuple):
    """A loaded reward and its name in addresses."""

    name: str
    reward: Reward
    notes: tuple[str, ...] = ()


def load_named(
    references: Sequence[str], folder: Path, choice: SandboxChoice, options: Mapping[str, Any]
) -> list[Named]:
    """Load rewards, each called by its id or by the name before it.

    Args:
        references: `file.py:function`, or `name=file.py:function`.
        folder: what file paths are relative to.
        choice: what the user says of their sandbox.
        options: of the one reward; where there are several, each begins with the name of its own and a dot.

    Raises:
        ConfigError: one cannot be loaded, two have one name, or an option is of none of them.
    """
    named: dict[str, Named] = {}
    is_single, unused = len(references) == 1, set(options)
    for text in references:
        found = _NAMED.fullmatch(text)
        name, reference = (found[1], found[2]) if found else ("", text)
        if reference.startswith(("http://", "https://")):
            raise ConfigError(f"{checked_address(reference)} is served already; name a function of this machine")
        called = name or split_reference(reference)[1]
        own = {key: key if is_single else key.removeprefix(f"{called}.") for key in options}
        own = {key: short for key, short in own.items() if is_single or short != key}
        unused -= own.keys()
        loaded = load_reward(reference, folder, choice, {short: options[key] for key, short in own.items()})
        name = name or loaded.reward.id
        if not NAME.fullmatch(name):
            raise ConfigError(f"reward {name!r} cannot be part of an address: write NAME={reference}")
        if name in named:
            raise ConfigError(f"two rewards are called {name!r}: write NAME={reference} for one of them")
        named[name] = Named(name, loaded.reward, loaded.notes)
    if unused:
        names = " or ".join(f"{name}." for name in named)
        raise ConfigError(f"-O {min(unused)}: with several rewards an option begins with whose it is: {names}")
    return list(named.values())


class ServedReward:
    """Scores requests of many clients by one reward, as many at a time as the options say.

    Args:
        named: the reward and its name.
        options: of the server.

    Attributes:
        about: what is told of it.
        agent: makes the calls; open it before the first one.
        pending: rollouts that were accepted and are not answered.
        outcomes: answers by "scored" and by the class of their failure.
        call_seconds: what answers say that their calls took.
    """

    def __init__(self, named: Named, options: ServerOptions) -> None:
        reward = named.reward
        scorer = scorer_of(reward, options.deadline_s)
        self.agent = AsyncRewardAgent(scorer, max_concurrency=options.max_concurrency)
        # What finishes groups gives its scores together, and is a batch reward to whoever asks.
        self._in_groups = scorer.mode == "batch" or reward.mode == "batch" or hasattr(scorer, "finish_group")
        self.about = AboutBody(
            name=named.name,
            id=reward.id,
            mode="batch" if self._in_groups else "pointwise",
            parameters=None if reward.parameters is None else sorted(reward.parameters),
            required=sorted(reward.required),
            level=reward.level if isinstance(reward, ConfinedReward) else "in_process",
            digest=scorer_hash(reward),
            deadline_s=options.deadline_s,
            max_batch=options.max_batch,
        )
        self.wants_episodes = reward.parameters is None or "step_data" in reward.parameters
        self._options = options
        self.pending = 0
        self.outcomes: Counter[str] = Counter()
        self.call_seconds = Histogram()

    def check_room(self, count: int = 1) -> None:
        """Refuse what would be too much.

        Raises:
            RefusedError: so many rollouts do not fit any more.
        """
        if self.pending + count > self._options.max_pending:
            mean_s = self.call_seconds.sum / max(1, self.call_seconds.count)
            wait_s = min(_LONGEST_WAIT_S, self.pending * mean_s / self._options.max_concurrency)
            raise busy(f"{self.pending} rollouts wait for reward {self.about.name!r} (max_pending)", wait_s)

    @contextmanager
    def room_for(self, count: int) -> Iterator[None]:
        """Have rollouts pending inside of the block; raises as `check_room`."""
        self.check_room(count)
        self.pending += count
        try:
            yield
        finally:
            self.pending -= count

    async def score(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """The scores of rollouts in their order; where the caller is cancelled, the calls are too."""
        scored = await self.agent.score_all(requests, len(requests) if self._in_groups else 1)
        for one in scored:
            self.outcomes["scored" if one.failure is None else one.failure.failure_class] += 1
            self.call_seconds.add(one.duration_s)
        return scored


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "reward_kit_serve_"
Samples = Iterable[tuple[str, Labels, float]]


class Metrics:
    """The figures of one server.

    Args:
        rewards: what is served.

    Attributes:
        requests: answered, by route and status; 499 where the client hung up.
        request_seconds: of each route, from the head of a request to its answer.
    """

    def __init__(self, rewards: Iterable[ServedReward]) -> None:
        self._rewards = list(rewards)
        self.requests: Counter[tuple[str, int]] = Counter()
        self.request_seconds: dict[str, Histogram] = {}

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self.requests[route, status] += 1
        self.request_seconds.setdefault(route, Histogram()).add(seconds)

    def text(self, connections: int, held_bytes: int) -> str:
        """All figures."""
        return "".join(self._parts(connections, held_bytes))

    def _parts(self, connections: int, held_bytes: int) -> Iterator[str]:
        requests = (("", {"route": r, "status": str(s)}, n) for (r, s), n in sorted(self.requests.items()))
        yield _family("requests_total", "counter", "Requests that were answered.", requests)
        spans = (one for route, span in sorted(self.request_seconds.items()) for one in span.samples({"route": route}))
        yield _family("request_seconds", "histogram", "From the head of a request to its answer.", spans)
        yield _family("connections", "gauge", "Open connections.", [("", {}, connections)])
        yield _family("held_bytes", "gauge", "Bytes of request bodies.", [("", {}, held_bytes)])
        yield from self._of_rewards()

    def _of_rewards(self) -> Iterator[str]:
        named = [(reward, {"reward": reward.about.name}, reward.agent.stats) for reward in self._rewards]
        outcomes = (
            ("", {**labels, "outcome": outcome}, count)
            for reward, labels, _ in named
            for outcome, count in sorted(reward.outcomes.items())
        )
        yield _family("rollouts_total", "counter", "Rollouts that were answered: scored, or why not.", outcomes)
        pending = [("", labels, reward.pending) for reward, labels, _ in named]
        yield _family("pending", "gauge", "Rollouts that were accepted and are not answered.", pending)
        flying = [("", labels, stats.in_flight) for _, labels, stats in named]
        yield _family("calls_in_flight", "gauge", "Calls of a reward that are being made.", flying)
        cost = [("", labels, stats.cost_usd) for _, labels, stats in named if stats.cost_usd is not None]
        yield _family("cost_usd_total", "counter", "Dollars that scores say they took.", cost)
        calls = (one for reward, labels, _ in named for one in reward.call_seconds.samples(labels))
        yield _family("call_seconds", "histogram", "Of a call, with its wait for a thread or a worker.", calls)


def _family(name: str, kind: str, told: str, samples: Samples) -> str:
    whole = f"{_PREFIX}{name}"
    lines = [f"# HELP {whole} {told}", f"# TYPE {whole} {kind}"]
    lines += [f"{whole}{suffix}{_labels(labels)} {value:.17g}" for suffix, labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    escaped = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{','.join(escaped)}}}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

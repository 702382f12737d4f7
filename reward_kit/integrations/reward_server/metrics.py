"""What a reward server counts, in the text form that Prometheus reads.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format (version 0.0.4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from reward_kit.integrations.reward_server.histogram import Histogram, Labels
from reward_kit.integrations.reward_server.served import ServedReward

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

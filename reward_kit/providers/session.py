"""The request queues, the cassette and the notices that all requests of a run share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from reward_kit.errors import ConfigError
from reward_kit.providers.cassette import Cassette
from reward_kit.providers.keys import NO_KEY, OPENAI_KEY, EndpointSettings, key_variable, resolve_endpoint
from reward_kit.providers.request_queue import Rates, RequestQueue
from reward_kit.validation import check_positive

if TYPE_CHECKING:
    from reward_kit.providers.response_cache import ResponseCache

_log = logging.getLogger(__name__)


class ProviderSession:
    """The state that all requests of one run share.

    Policies in the same session share rate limits, outages and recordings.

    Args:
        cassette: the cassette that records or replays the exchanges.
        cache: the cache that contains responses from earlier runs.
        outage_time_s: the number of seconds to wait for an endpoint that is down or asks for a pause. The default is
            600. For an endpoint that has never answered, the default is 60, or 3 if the endpoint refuses the
            connection.
        is_dry_run: True if no request will be made. In that case, a missing key is a notice instead of an error.

    Attributes:
        notice: a function that receives a line when an endpoint goes down, recovers, or limits the rate.
        gave_up: a function that is called once, with the reason, when further requests are pointless: the endpoint has
            not answered in time, or the key, the account or the host is rejected. The function is called outside any
            request and before the waiting requests fail, so it can cancel those requests.

    Raises:
        ConfigError: If `outage_time_s` is not a positive number.
    """

    def __init__(
        self,
        *,
        cassette: Cassette | None = None,
        cache: ResponseCache | None = None,
        outage_time_s: float | None = None,
        is_dry_run: bool = False,
    ) -> None:
        if outage_time_s is not None:
            check_positive("outage_time_s", outage_time_s)
        self.cassette = cassette
        self.cache = cache
        self.outage_time_s = outage_time_s
        self.is_dry_run = is_dry_run
        self.notice: Callable[[str], None] = _log.warning
        self.gave_up: Callable[[str], None] | None = None
        self._has_given_up = False
        self._reported: set[str] = set()
        self._queues: dict[tuple[str, str], RequestQueue] = {}

    @property
    def is_replaying(self) -> bool:
        """True if all responses come from a recording."""
        return self.cassette is not None and self.cassette.is_replaying

    @property
    def is_down(self) -> bool:
        """True if an endpoint is down and requests are waiting for it to recover."""
        return any(queue.is_down for queue in self._queues.values())

    def longest_wait(self) -> tuple[float, str] | None:
        """Return the waiting time of the longest-waiting request in seconds, and a description of that request.

        Return None if there are no requests.
        """
        waits = ((wait, model) for (_, model), queue in self._queues.items() if (wait := queue.longest_wait()))
        wait, model = max(waits, default=(None, ""))
        if wait is None:
            return None
        return wait.seconds, f"a queued request to {model}" if wait.is_queued else f"a response from {model}"

    def queue(self, url: str, model: str, rates: Rates | None = None) -> RequestQueue:
        """Return the queue for a model at an endpoint. The same model and endpoint always get the same queue.

        Raises:
            ConfigError: If the queue already exists with different rates.
        """
        rates = rates or Rates()
        queue = self._queues.get((url, model))
        if queue is None:
            queue = self._queues[url, model] = RequestQueue(f"{url} ({model})", rates, self)
        if not rates.is_unlimited and queue.rates != rates:
            raise ConfigError(
                f"two policies use {model!r} at {url} and share the rate limits, but they set different limits: "
                f"{queue.rates} and {rates}"
            )
        return queue

    def report_missing_key(self, problem: str) -> None:
        """Report a missing key that an actual run would need. Each problem is reported only once."""
        if problem not in self._reported:
            self._reported.add(problem)
            self.tell(problem)

    def tell(self, line: str) -> None:
        """Pass a line to `notice`."""
        self.notice(line)

    def give_up(self, reason: str) -> None:
        """Call `gave_up` with the reason. Only the first call has an effect."""
        if not self._has_given_up and self.gave_up is not None:
            self._has_given_up = True
            self.gave_up(reason)

    def close(self) -> None:
        """Close the cassette and the cache, if any."""
        for file in (self.cassette, self.cache):
            if file is not None:
                file.close()


def endpoint_for(
    traffic: ProviderSession | None,
    base_url: str | None = None,
    api_key: str | None = None,
    api_key_env: str | None = None,
    *,
    usual_key: str = OPENAI_KEY,
) -> EndpointSettings:
    """Call `resolve_endpoint` with the requirements of a session.

    A replay needs no key. A dry run only reports a missing key.
    """
    named = (base_url, api_key, api_key_env)
    if traffic is None or not traffic.is_dry_run:
        needs_key = traffic is None or not traffic.is_replaying
        return resolve_endpoint(*named, needs_key=needs_key, usual_key=usual_key)
    settings = resolve_endpoint(*named, needs_key=False, usual_key=usual_key)
    if settings.api_key is None and not traffic.is_replaying:
        try:
            resolve_endpoint(*named, usual_key=usual_key)
        except ConfigError as error:
            traffic.report_missing_key(str(error))
    return settings


def key_variable_for(
    traffic: ProviderSession | None,
    options: Mapping[str, Any],
    of_user: Collection[str] = (),
    *,
    is_default: bool = False,
) -> Any:
    """Call `key_variable` with the requirements of a session.

    A replay sends no key. A dry run only reports an error. If `is_default` is true, the variable is the provider's
    default. In that case, it is not an error if the user has not configured the variable for the URL, and the requests
    are sent without a key.
    """
    base_url, named = options.get("base_url"), options.get("api_key_env")
    if options.get("api_key") or not (isinstance(base_url, str | None) and isinstance(named, str | None)):
        return named  # the value in the file; a wrong value is rejected where it is used
    if traffic is not None and traffic.is_replaying:
        return NO_KEY
    try:
        return key_variable(base_url, named, of_user=of_user)
    except ConfigError as error:
        if is_default:
            return NO_KEY
        if traffic is None or not traffic.is_dry_run:
            raise
        traffic.report_missing_key(str(error))
        return NO_KEY


CURRENT_PROVIDER_SESSION: ContextVar[ProviderSession | None] = ContextVar("CURRENT_PROVIDER_SESSION", default=None)
"""The provider session of the current run, for endpoint callers that the run does not create, such as LLM judges."""

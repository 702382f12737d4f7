"""Export of traces to an OpenTelemetry collector by OTLP over HTTP, either live or from a finished run.

The SDK reads the standard variables, such as OTEL_EXPORTER_OTLP_HEADERS and OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from reward_kit.display_text import escape_text
from reward_kit.errors import ConfigError, ProviderError, StoreError, boundary, requires_extra
from reward_kit.runs.redaction import Redaction, known_secrets
from reward_kit.runs.results import Result
from reward_kit.runs.run_folder import RunHeader
from reward_kit.telemetry.current import CURRENT_TELEMETRY
from reward_kit.telemetry.traces import Telemetry, derived_ids

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger("reward_kit.runs")
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FROM_ENVIRONMENT = "env"
"""The value of `--otlp` that takes the endpoint from the standard variables."""
_SDK_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_TRACES_PATH = "/v1/traces"
_BATCH = 512  # spans per request; this is the default of the SDK
_FLUSH_MS = 10_000


def traces_endpoint(url: str) -> str:
    """Return the URL to which spans are sent: `url`, followed by `/v1/traces` if `url` has no path.

    Raises:
        ConfigError: `url` is not an HTTP URL, or no endpoint is set in the environment.
    """
    if url == FROM_ENVIRONMENT:
        traces, base = (os.environ.get(name, "") for name in ENDPOINT_VARIABLES)
        if not (traces or base):
            raise ConfigError(f"--otlp {url}: set {ENDPOINT_VARIABLES[1]}, or pass the URL of the collector")
        url = traces or base.rstrip("/") + _TRACES_PATH
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"--otlp {escape_text(url, 200)}: pass an HTTP URL, such as http://localhost:4318")
    return url if address.path.strip("/") else f"{url.rstrip('/')}{_TRACES_PATH}"


class Sender:
    """A span exporter that counts the spans and remembers the reason for the last failure.

    Attributes:
        sent: the number of spans that the collector accepted.
        reason: the last error; None after a success.
    """

    def __init__(self, endpoint: str) -> None:
        with requires_extra("otel", "OTLP"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import SpanExportResult
        self.endpoint, self.sent = endpoint, 0
        self.reason: str | None = None
        self._exporter = OTLPSpanExporter(endpoint)
        self._success = SpanExportResult.SUCCESS
        self._messages: list[str] = []
        log = logging.getLogger(_SDK_LOG)
        log.propagate = False  # the reason is reported only once, not for each batch
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self._messages.append(record.getMessage())  # type: ignore[method-assign]
        log.handlers[:] = [handler]

    def send(self, spans: Sequence[ReadableSpan]) -> bool:
        """Send spans, and return True if the collector accepted them."""
        self._messages.clear()
        if self._exporter.export(spans) is self._success:
            self.sent, self.reason = self.sent + len(spans), None
            return True
        first = self._messages[0] if self._messages else "unknown error"
        cause = first.partition("Caused by ")[2] or first  # without the call chain of the HTTP client
        self.reason = escape_text(cause.partition(" encountered while ")[0], 300)
        return False

    def close(self) -> None:
        """Close the connection, and stop waiting for a retry."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def make_provider(processor: SpanProcessor) -> TracerProvider:
    """Return a provider whose ids are derived from the episodes. Its default service name is `reward-kit`."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "reward-kit"}))
    provider = TracerProvider(resource=resource, id_generator=derived_ids(), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def _span_list(spans: list[ReadableSpan]) -> SpanProcessor:
    from opentelemetry.sdk.trace import SpanProcessor

    class SpanCollector(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            spans.append(span)

    return SpanCollector()


def export_results(
    header: RunHeader, results: Iterator[Result], endpoint: str, progress: Callable[[int], None] = lambda _: None
) -> tuple[int, int]:
    """Send the traces of episodes. Only a bounded number of spans is kept in memory.

    Args:
        header: the header of the run.
        results: the episodes.
        endpoint: the URL of the collector.
        progress: a function that is called with the number of exported episodes.

    Returns:
        The number of episodes and the number of spans that were sent.

    Raises:
        ProviderError: the collector did not accept spans. The message contains the number of episodes that were already
            sent.
    """
    sender, waiting, count, complete = Sender(endpoint), list[Any](), 0, 0
    redaction = Redaction(known_secrets(header.task))
    telemetry = Telemetry(
        make_provider(_span_list(waiting)),
        run_id=header.run_id or "",
        task=header.task_name,
        redact=redaction.redact_text,
    )
    run_start = header.timing.started_at

    def flush(smallest: int) -> None:
        while len(waiting) >= smallest and waiting:
            batch = waiting[:_BATCH]
            if not sender.send(batch):
                missing = count - complete + sum(1 for _ in results)
                raise ProviderError(
                    f"{endpoint} did not accept the spans: {sender.reason}; {complete:,} episodes were sent, and "
                    f"{missing:,} were not; if you repeat the export, the same ids are sent again"
                )
            del waiting[: len(batch)]

    try:
        for result in results:
            with boundary(StoreError, f"episodes.jsonl: {result.episode['rollout_id']} cannot be read as an episode"):
                telemetry.finish_episode(result.episode, run_start)
                if result.score is not None:
                    telemetry.finish_reward(result.score, run_start, result.episode.get("timing") or {})
            count += 1
            flush(_BATCH)
            if not waiting:
                complete = count
            progress(count)
        flush(1)
    finally:
        sender.close()
    return count, sender.sent


@contextmanager
def live_export(endpoint: str, run_id: str, task: str, redaction: Redaction) -> Iterator[None]:
    """Send the spans that are created in the block while the block runs.

    If the collector fails, warn once and report the number of dropped spans.
    """
    sender = Sender(endpoint)
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Exporter(SpanExporter):
        has_warned = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            if sender.send(spans):
                return SpanExportResult.SUCCESS
            if not self.has_warned:
                self.has_warned = True
                logger.warning("telemetry: %s did not accept spans: %s; the run continues", endpoint, sender.reason)
            return SpanExportResult.FAILURE

        def shutdown(self) -> None:
            sender.close()

    class Processor(BatchSpanProcessor):
        ended = 0

        def on_end(self, span: ReadableSpan) -> None:
            self.ended += 1
            super().on_end(span)

    exporter: SpanExporter = Exporter()
    processor = Processor(exporter)
    provider = make_provider(processor)
    telemetry = Telemetry(provider, run_id=run_id, task=task, redact=redaction.redact_all)
    token = CURRENT_TELEMETRY.set(telemetry)
    try:
        yield
    finally:
        CURRENT_TELEMETRY.reset(token)
        if sender.reason is None:
            provider.force_flush(_FLUSH_MS)
        else:
            sender.close()
        provider.shutdown()
        if dropped := processor.ended - sender.sent:
            logger.warning("telemetry: %s of %s spans were dropped", f"{dropped:,}", f"{processor.ended:,}")

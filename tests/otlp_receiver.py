"""An OTLP/HTTP receiver that decodes the spans that it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class ReceivedSpan(NamedTuple):
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    attributes: dict[str, Any]
    start: int
    end: int
    is_error: bool
    message: str
    events: list[tuple[str, dict[str, Any]]]
    schema_url: str
    service: str


class Receiver(ThreadingHTTPServer):
    """A collector on a free port. `status` is the status of its answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[ReceivedSpan] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def tree(self) -> dict[str, list[Any]]:
        """Return the names of the spans of each conversation, as nested lists."""
        children: dict[str, list[ReceivedSpan]] = {}
        for span in self.spans:
            children.setdefault(span.parent_id, []).append(span)

        def below(span: ReceivedSpan) -> list[Any]:
            return [
                span.name,
                *map(below, sorted(children.get(span.span_id, []), key=lambda one: (one.start, one.name))),
            ]

        roots = [span for span in self.spans if not span.parent_id]
        return {span.attributes["gen_ai.conversation.id"]: below(span) for span in roots}


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.headers.append(dict(self.headers))
        self.server.paths.append(self.path)
        if self.server.status == 200:
            self.server.spans += _decode(ExportTraceServiceRequest.FromString(body))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *arguments: Any) -> None:
        return


def _decode(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    span.kind,
                    _attributes(span.attributes),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == 2,
                    span.status.message,
                    [(event.name, _attributes(event.attributes)) for event in span.events],
                    scope.schema_url,
                    service,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

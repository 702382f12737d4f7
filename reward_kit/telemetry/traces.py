"""OpenTelemetry traces of episodes, created either while the episodes are collected or from a finished run.

The spans and their attributes are always derived from an episode's record and score line, so both ways produce the same
trace. While an episode is running, its spans are started but not completed, so that tools, resources and rewards can
propagate the W3C context. If telemetry is off, `opentelemetry` is not imported.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from reward_kit.display_text import escape_text
from reward_kit.errors import EpisodeError, boundary, requires_extra
from reward_kit.lazy import package_version
from reward_kit.telemetry.current import CURRENT_TELEMETRY, EpisodeSpans
from reward_kit.telemetry.records import (
    Record,
    RecordClock,
    call_arguments,
    conversation,
    derive_id,
    episode_attributes,
    error_of,
    has_tokens,
    nanoseconds,
    step_outcome,
    tool_messages,
    usage_attributes,
)

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

logger = logging.getLogger("reward_kit.agent")
SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai-dev/1.42.0-dev"
"""The version of OpenTelemetry's semantic conventions for generative AI that the spans follow."""
CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The standard environment variable that adds messages, arguments and results to the spans."""
_LONGEST_NAME = 100  # a model may invent long tool names
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_UNKNOWN = "_OTHER"  # the conventional value for a required attribute whose value is unknown
_CONTENT_MODES = ("true", "1", "span_only", "span_and_event")
_NEXT_IDS: ContextVar[tuple[int, int] | None] = ContextVar("_NEXT_IDS", default=None)
Attributes = Mapping[str, Any]


class LiveSpans(EpisodeSpans):
    """The spans of a running episode, keyed by path. `Telemetry.finish_episode` completes them."""

    def __init__(self, telemetry: Telemetry, root: Span) -> None:
        self._telemetry, self.open = telemetry, {"": root}
        context = root.get_span_context()
        flags = int(context.trace_flags)
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def step(self, t: int) -> AbstractContextManager[None]:
        """Start the span of a step, which is the current span within the `with` block."""
        return self._current(f"step/{t}", "")

    def tool(self, t: int, index: int) -> AbstractContextManager[None]:
        """Start the span of a tool call, which is the current span within the `with` block."""
        return self._current(f"step/{t}/tool/{index}", f"step/{t}")

    @contextmanager
    def _current(self, path: str, parent: str) -> Iterator[None]:
        from opentelemetry import trace

        above = self.open[parent]
        span = self.open[path] = self._telemetry.start(path, trace.set_span_in_context(above), self.root_ids)
        with trace.use_span(span):
            yield

    @property
    def root_ids(self) -> tuple[int, int]:
        """The trace id and the span id of the episode."""
        context = self.open[""].get_span_context()
        return context.trace_id, context.span_id


class Telemetry:
    """The traces of one run or of an application's episodes.

    Args:
        provider: the provider of the spans.
        run_id: the id of the run, if any.
        task: the name of the task.
        redact: a function that hides secrets in a string.
    """

    def __init__(
        self, provider: TracerProvider, *, run_id: str = "", task: str = "", redact: Callable[[str], str] = str
    ) -> None:
        self._tracer = provider.get_tracer("reward_kit", package_version(), schema_url=SCHEMA_URL)
        self._run: dict[str, Any] = {"reward_kit.run.id": run_id or None, "reward_kit.task.name": task or None}
        self._run_id, self._redact = run_id, redact
        self._open: dict[tuple[int, int], LiveSpans] = {}
        self._rewards: dict[tuple[str, tuple[int, int]], Span] = {}
        self._has_content = os.environ.get(CONTENT_VARIABLE, "").strip().lower() in _CONTENT_MODES

    # While an episode is running

    @contextmanager
    def episode(self, rollout_id: str, started_at: datetime.datetime) -> Iterator[LiveSpans]:
        """Start an episode's span as a child of the current span.

        The new span is the current span within the `with` block.
        """
        from opentelemetry import context, trace

        ids = self._root_ids(rollout_id, started_at.isoformat(timespec="microseconds"))
        root = self.start("", context.get_current(), ids, start_ns=nanoseconds(started_at))
        spans = LiveSpans(self, root)
        self._open[spans.root_ids] = spans
        with trace.use_span(root):
            yield spans

    def begin_reward(self, rollout_id: str, episode_timing: Record | None) -> None:
        """Make the span of a reward call the current span. The first attempt at the call starts the span."""
        from opentelemetry import context, trace

        ids, parent = self._reward_parent(rollout_id, episode_timing)
        if (span := self._rewards.get((rollout_id, ids))) is None:
            span = self._rewards[rollout_id, ids] = self.start("reward", parent, ids)
        context.attach(trace.set_span_in_context(span))

    def start(
        self,
        path: str,
        parent: Context,
        root_ids: tuple[int, int],
        *,
        start_ns: int | None = None,
        is_client: bool = False,
    ) -> Span:
        """Start a span.

        If the provider uses `DerivedIds`, the span's ids are derived from the episode's ids and the span's path.
        """
        from opentelemetry.trace import SpanKind

        ids = root_ids if not path else (root_ids[0], derive_id(8, *root_ids, path))
        token = _NEXT_IDS.set(ids if any(root_ids) else None)
        try:
            kind = SpanKind.CLIENT if is_client else SpanKind.INTERNAL
            return self._tracer.start_span(path or "episode", parent, kind, start_time=start_ns)
        finally:
            _NEXT_IDS.reset(token)

    def end_episode(self, record: Record) -> None:
        """Call `finish_episode`. An error is only logged, because telemetry must not cause an episode to fail."""
        with _logged(record["rollout_id"]):
            self.finish_episode(record)

    def end_reward(self, score: Record, zero: datetime.datetime, episode_timing: Record | None) -> None:
        """Call `finish_reward`. An error is only logged."""
        with _logged(score["rollout_id"]):
            self.finish_reward(score, zero, episode_timing)

    # From records

    def finish_episode(self, record: Record, run_start: datetime.datetime | None = None) -> None:
        """Create and end the spans of an episode, except for the span of its reward.

        Args:
            record: the record, as in `episodes.jsonl`.
            run_start: the start of the run, which is used for an episode without times.
        """
        from opentelemetry.context import Context

        timing = record.get("timing") or {}
        ids, clock = self._recorded_ids(record["rollout_id"], timing), RecordClock(timing, run_start)
        spans = self._open.pop(ids, None)
        maker = _SpanMaker(self, ids, clock.zero_ns, spans.open if spans is not None else {})
        root = maker.span("", Context(), 0.0)
        for t, times in enumerate(clock.step_times(len(record["steps"]))):
            self._make_step(maker, record, t, times, clock)
        facts, usage = episode_attributes(record), record.get("usage") or {}
        maker.end(
            root,
            f"invoke_agent {record.get('policy') or ''}".strip(),
            {**self._run, **facts, **usage_attributes(usage), "reward_kit.time.estimated": clock.is_estimated},
            clock.duration_s,
            error_of(record.get("failure")),
        )
        maker.end_rest(clock.duration_s)

    def _make_step(self, maker: _SpanMaker, record: Record, t: int, times: Sequence[float], clock: RecordClock) -> None:
        began, asked, answered, ended = times
        is_taken = t < len(record["steps"])  # otherwise, an error ended the step
        info = step_outcome(record, t) if is_taken else {}
        path = f"step/{t}"
        step = maker.span(path, maker.below(""), began)
        calls = [call for call in clock.model_calls if began <= call["began"] <= ended]
        if not calls and is_taken and (info.get("usage") or has_tokens(record, t)):
            # The policy uses a separate client or a local model.
            calls = [{"began": asked, "ended": answered, **{key: info.get(key) for key in ("usage", "finish_reason")}}]
        last = max((i for i, call in enumerate(calls) if not call.get("caller")), default=-1)
        for i, call in enumerate(calls):
            facts: dict[str, Any] = {"gen_ai.conversation.id": record["rollout_id"]}
            if i == last and is_taken and self._has_content:
                facts |= conversation(record, t, call.get("finish_reason"))
            self._make_model_call(maker, f"{path}/model/{i}", path, call, facts)
        attributes: dict[str, Any] = {"reward_kit.step.index": t}
        if is_taken:
            self._make_tools(maker, record, t, info.get("tools") or (), clock.tool_times(t, answered, ended))
            attributes |= {
                "reward_kit.step.reward": record["steps"][t].get("reward"),
                "reward_kit.step.is_action_valid": info.get("is_action_valid"),
            }
        maker.end(step, f"step {t}", attributes, ended, None if is_taken else error_of(record.get("failure")))

    def _make_tools(
        self, maker: _SpanMaker, record: Record, t: int, tools: Sequence[Record], times: Iterator[Sequence[float]]
    ) -> None:
        answers = tool_messages(record, t)
        for i, (tool, (began, ended)) in enumerate(zip(tools, times, strict=False)):
            span = maker.span(f"step/{t}/tool/{i}", maker.below(f"step/{t}"), began)
            name = escape_text(str(tool.get("name")), _LONGEST_NAME)
            answer = answers[i] if len(answers) == len(tools) else {}
            attributes: dict[str, Any] = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": name,
                "gen_ai.tool.type": "function",
                "gen_ai.tool.call.id": answer.get("tool_call_id"),
                "reward_kit.tool.skipped": tool.get("skipped"),
            }
            if self._has_content:
                attributes["gen_ai.tool.call.arguments"] = call_arguments(record, t, answer.get("tool_call_id"))
                attributes["gen_ai.tool.call.result"] = answer.get("content")
            error = ("tool_error", str(tool["error"])) if "error" in tool else None
            maker.end(span, f"execute_tool {name}", attributes, ended, error)

    def _make_model_call(self, maker: _SpanMaker, path: str, parent: str, call: Record, attributes: Attributes) -> None:
        server, reason = urlsplit(f"//{call.get('server') or ''}"), call.get("finish_reason")
        span = maker.span(path, maker.below(parent), call["began"], is_client=True)
        facts = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": call.get("provider") or _UNKNOWN,
            "gen_ai.request.model": call.get("model"),
            "gen_ai.response.finish_reasons": [reason] if reason else None,
            "server.address": server.hostname,
            "server.port": server.port,
            "reward_kit.model_call.caller": call.get("caller"),
            "reward_kit.model_call.retries": call.get("retries"),
            **usage_attributes(call.get("usage") or {}),
            **attributes,
        }
        error = (call["error"], "") if call.get("error") else None
        maker.end(span, f"chat {call.get('model') or ''}".strip(), facts, call["ended"], error)

    def finish_reward(self, score: Record, zero: datetime.datetime, episode_timing: Record | None) -> None:
        """Create and end the span of a reward call and the spans of the model calls that it made.

        Args:
            score: the score, as in `scores.jsonl`.
            zero: the point in time to which the times in the score are relative.
            episode_timing: the `timing` of the episode, or None if the score does not belong to an episode.
        """
        name, timing, rollout_id = str(score["scorer"]["id"]), score.get("timing") or {}, score["rollout_id"]
        ids, parent = self._reward_parent(rollout_id, episode_timing)
        attempts, submitted = timing.get("attempts") or (), timing.get("submitted_s") or 0.0
        began, ended = submitted, submitted + (timing.get("duration_s") or 0.0)
        if attempts:
            began, ended = attempts[0][0], attempts[-1][1]
        started = self._rewards.pop((rollout_id, ids), None)
        maker = _SpanMaker(self, ids, nanoseconds(zero), {"reward": started} if started is not None else {})
        span = maker.span("reward", parent, began)
        calls = [call for call in timing.get("model_calls") or () if not call.get("is_cached")]
        for i, call in enumerate(calls):
            self._make_model_call(maker, f"reward/model/{i}", "reward", call, {"gen_ai.conversation.id": rollout_id})
        result = score.get("result") or {}
        for metric, facts in ((name, result), *sorted((result.get("metrics") or {}).items())):
            if facts.get("score") is None or facts.get("is_score_valid") is False or score.get("failure"):
                continue
            event = {"gen_ai.evaluation.name": metric, "gen_ai.evaluation.score.value": float(facts["score"])}
            if self._has_content:
                event["gen_ai.evaluation.explanation"] = facts.get("reason")
            span.add_event("gen_ai.evaluation.result", self.clean(event), maker.at(ended))
        attributes = {
            "gen_ai.evaluation.name": name,
            "gen_ai.evaluation.score.value": score.get("score"),
            "gen_ai.conversation.id": rollout_id,
            "reward_kit.reward.attempts": len(attempts) or None,
            "reward_kit.time.estimated": None if attempts else True,
        }
        maker.end(span, f"reward {name}", attributes, ended, error_of(score.get("failure")))

    def _reward_parent(self, rollout_id: str, episode_timing: Record | None) -> tuple[tuple[int, int], Context]:
        """Return the ids of the episode to which a reward call belongs, and the context of the episode.

        If the call does not belong to an episode, return the current context.
        """
        from opentelemetry import context, trace

        if (
            episode_timing is None or trace.get_current_span().get_span_context().is_remote
        ):  # the context of a server's client
            return (0, 0), context.get_current()
        ids = self._recorded_ids(rollout_id, episode_timing)
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        above = trace.NonRecordingSpan(trace.SpanContext(*ids, is_remote=False, trace_flags=flags))
        return ids, trace.set_span_in_context(above)

    def _root_ids(self, rollout_id: str, started_at: str) -> tuple[int, int]:
        identity = (self._run_id, rollout_id, started_at)
        return derive_id(16, *identity), derive_id(8, "episode", *identity)

    def _recorded_ids(self, rollout_id: str, timing: Record) -> tuple[int, int]:
        if match := _TRACEPARENT.fullmatch(str(timing.get("traceparent"))):
            return int(match[1], 16), int(match[2], 16)
        return self._root_ids(rollout_id, str(timing.get("started_at")))

    def clean(self, attributes: Attributes) -> dict[str, Any]:
        """Return the attributes with known values, as redacted text that can be encoded as UTF-8."""
        return {key: self.clean_text(value) for key, value in attributes.items() if value is not None}

    def clean_text(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.clean_text(item) for item in value]
        if isinstance(value, str):
            return self._redact(value).encode("utf-8", "replace").decode()
        return value if isinstance(value, bool | int | float) else self.clean_text(json.dumps(value))


@contextmanager
def _logged(rollout_id: str) -> Iterator[None]:
    try:
        with boundary(EpisodeError, f"telemetry of episode {rollout_id}"):
            yield
    except EpisodeError as error:
        logger.warning("%s", error)


class _SpanMaker:
    """The spans of one trace. Some spans were started while the episode was running, and the others are new.

    Args:
        telemetry: the telemetry.
        root_ids: the trace id and the span id of the episode.
        zero_ns: the point in time to which all times are relative.
        started: the started spans, keyed by path.
    """

    def __init__(
        self, telemetry: Telemetry, root_ids: tuple[int, int], zero_ns: int, started: Mapping[str, Span]
    ) -> None:
        self._telemetry, self._root_ids, self.zero_ns = telemetry, root_ids, zero_ns
        self._rest, self._spans = dict(started), dict(started)

    def at(self, time_s: float) -> int:
        return self.zero_ns + round(time_s * 1e9)

    def span(self, path: str, parent: Context, began: float, *, is_client: bool = False) -> Span:
        """Return the span if it was already started, or start it."""
        if (span := self._rest.pop(path, None)) is None:
            began_ns = self.at(began)
            span = self._telemetry.start(path, parent, self._root_ids, start_ns=began_ns, is_client=is_client)
        self._spans[path] = span
        return span

    def below(self, path: str) -> Context:
        """Return the context of a span."""
        from opentelemetry import trace

        return trace.set_span_in_context(self._spans[path])

    def end(self, span: Span, name: str, attributes: Attributes, ended: float, error: tuple[str, str] | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.update_name(self._telemetry.clean_text(name))
        if error is not None:
            attributes = {**attributes, "error.type": error[0]}
            span.set_status(Status(StatusCode.ERROR, self._telemetry.clean_text(error[1])))
        span.set_attributes(self._telemetry.clean(attributes))
        span.end(self.at(ended))

    def end_rest(self, ended: float) -> None:
        """End the started spans that do not appear in the record."""
        for span in self._rest.values():
            span.end(self.at(ended))


@contextmanager
def tracing(provider: TracerProvider | None = None, *, redact: Callable[[str], str] = str) -> Iterator[Telemetry]:
    """Trace the episodes and rewards in the `with` block with OpenTelemetry.

    If there is a current span, it becomes the parent of the spans.

    Args:
        provider: the provider of the spans. The default is the application's global provider.
        redact: a function that hides secrets in a string.

    Raises:
        ConfigError: the extra `otel` is not installed.
    """
    with requires_extra("otel", "telemetry"):
        from opentelemetry import trace
    telemetry = Telemetry(provider or trace.get_tracer_provider(), redact=redact)
    token = CURRENT_TELEMETRY.set(telemetry)
    try:
        yield telemetry
    finally:
        CURRENT_TELEMETRY.reset(token)


def derived_ids() -> Any:
    """Return an id generator for the SDK that uses the ids from `Telemetry`, so a second export has the same ids."""
    from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator

    class DerivedIds(IdGenerator):
        def generate_trace_id(self) -> int:
            ids = _NEXT_IDS.get()
            return ids[0] if ids is not None else RandomIdGenerator().generate_trace_id()

        def generate_span_id(self) -> int:
            ids = _NEXT_IDS.get()
            return ids[1] if ids is not None else RandomIdGenerator().generate_span_id()

    return DerivedIds()

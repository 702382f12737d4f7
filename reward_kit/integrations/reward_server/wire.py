"""The requests and responses of a reward server as pydantic models, and a reader for request bodies.

The reader limits the size of a body and the time in which it must arrive. A body must be strict JSON, and every error
names the field.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import anyio.to_thread
import pydantic
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from reward_kit.environments.base import StateSnapshot
from reward_kit.episodes.json_codec import from_json_value, to_json_value
from reward_kit.episodes.record import episode_from_record
from reward_kit.errors import EpisodeError, Failure, RewardKitError, boundary, type_name
from reward_kit.integrations.reward_server.options import MIB, RefusedError, ServerOptions, busy
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_agent.remote import AboutBody, AnswerBody
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.safe_input import strict_decoder

Codec = Literal["plain", "typed"]
_BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_RESULT_FIELDS = set(EvaluateResult.model_fields)
_MOST_PROBLEMS = 5
_MOST_BITS = 64
MOST_PARTS = 10_000
"""The maximum number of content parts, and of tool calls, in one message."""
_PARSED_IN_A_THREAD = 2**17
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONGEST_FIELD = 200


class StateBody(BaseModel):
    """A resource's final state in its stored form."""

    model_config = ConfigDict(strict=True, extra="forbid", title="State")

    kind: str = Field(description='The format of the payload: "json", "sqlite", "files", …')
    payload: str = Field(pattern=_BASE64, description="The payload in base64.")


class RolloutBody(BaseModel):
    """A rollout and the data that a reward function can see."""

    model_config = ConfigDict(strict=True, extra="forbid", title="Rollout")

    messages: list[Message] = Field(fail_fast=True, description="The whole conversation, in OpenAI chat format.")
    rollout_id: str | None = Field(
        None, description="The id of the rollout in the response. The default is its position in the request."
    )
    ground_truth: Any = Field(None, description="The ground truth of the sample.")
    assistant_turns: list[int] | None = Field(
        None,
        fail_fast=True,
        description="For each step, the index of its message. By default, every assistant message is a step.",
    )
    sample: dict[str, Any] = Field(default_factory=dict, description="The row of the sample.")
    environment_return: float | None = Field(None, description="The sum of the environment's rewards.")
    stop_reason: str | None = Field(None, description="The reason why the episode ended.")
    state: StateBody | None = Field(None, description="The final state, for rewards with a parameter final_state.")
    episode: dict[str, Any] | None = Field(
        None,
        description=(
            "A line of episodes.jsonl, for rewards with a parameter step_data. If the line cannot be "
            "parsed, the rollout is unscored."
        ),
    )
    extra: dict[str, Any] = Field(
        default_factory=dict, description="Additional values, keyed by name, such as goal_description."
    )


class ScoreBody(RolloutBody):
    """A request for one score."""

    model_config = ConfigDict(title="ScoreRequest")

    codec: Codec = Field("plain", description='"typed": values are encoded as in episodes.jsonl.')


class BatchBody(BaseModel):
    """A request for multiple scores. For a batch reward, the rollouts form one group."""

    model_config = ConfigDict(strict=True, extra="forbid", title="BatchRequest")

    rollouts: list[RolloutBody] = Field(min_length=1)
    codec: Codec = Field("plain", description='"typed": values are encoded as in episodes.jsonl.')


class BatchAnswerBody(BaseModel):
    """The scores, in the order of the request."""

    model_config = ConfigDict(strict=True, title="Scores")

    scores: list[AnswerBody]


class ListBody(BaseModel):
    """All rewards of a server."""

    model_config = ConfigDict(strict=True, title="Rewards")

    rewards: list[AboutBody]


def make_answer(scored: Scored, codec: Codec) -> dict[str, Any]:
    """Return the response for a score. See `AnswerBody`.

    If a step index has too many digits, only the rollout with that index is unscored.
    """
    steps = (scored.result.step_outputs if scored.result is not None else None) or ()
    if any(isinstance(step.step_index, int) and step.step_index.bit_length() > _MOST_BITS for step in steps):
        message = f"step_outputs: a step_index has more than {_MOST_BITS} bits"
        scored = replace(scored, result=None, failure=Failure("invalid_result", "RewardError", message))
    result = scored.result
    answer = {
        "rollout_id": scored.rollout_id,
        "score": scored.score,
        "result": None if result is None else result.model_dump(include=_RESULT_FIELDS),
        "error": scored.failure.to_json() if scored.failure else None,
        "duration_s": max(0.0, scored.duration_s),
        "sandbox": dict(scored.sandbox) if scored.sandbox else None,
        "stdout": scored.stdout,
        "stderr": scored.stderr,
        "is_output_cut": scored.is_output_cut,
        "retry_after_s": scored.retry_after_s,
    }
    return {key: to_json_value(value) for key, value in answer.items()} if codec == "typed" else answer


class BodyReader:
    """A reader for request bodies. `bytes` is the total size of the bodies in memory."""

    def __init__(self, options: ServerOptions) -> None:
        self.bytes = 0
        self._options, self._most = options, int(options.max_held_mb * MIB)

    def _take(self, count: int) -> None:
        if self.bytes + count > self._most:
            raise busy(f"the server holds {self.bytes / MIB:.0f} MiB of requests (max_held_mb)", 1.0)
        self.bytes += count

    @asynccontextmanager
    async def read(self, request: web.BaseRequest) -> AsyncIterator[bytearray]:
        """Read a body. Its size counts until the block ends, even if only the parsed values are still in use."""
        options, most = self._options, int(self._options.max_body_mb * MIB)
        too_large = RefusedError(
            413, "too_large", f"the body exceeds the limit of {options.max_body_mb:g} MiB (max_body_mb)", closes=True
        )
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RefusedError(415, "unsupported_media_type", "send the body uncompressed", closes=True)
        charset = (request.charset or "utf-8").lower()
        if request.content_type != "application/json" or charset not in ("utf-8", "utf8"):
            message = (
                f"Content-Type must be application/json in UTF-8, got {request.headers.get('Content-Type')!r:.100}"
            )
            raise RefusedError(415, "unsupported_media_type", message, closes=True)
        taken = request.content_length or 0
        if taken > most:
            raise too_large
        self._take(taken)
        try:
            if request.headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0
            body = bytearray()
            try:
                async with asyncio.timeout(options.body_timeout_s):
                    async for chunk in request.content.iter_any():
                        body += chunk
                        if len(body) > most:
                            raise too_large
                        if len(body) > taken:
                            self._take(len(body) - taken)
                            taken = len(body)
            except TimeoutError:
                message = f"the body did not arrive within {options.body_timeout_s:g} s (body_timeout)"
                raise RefusedError(408, "too_slow", message, closes=True) from None
            except (web.RequestPayloadError, OSError) as error:
                raise RefusedError(400, "invalid_request", f"the body is malformed: {error}", closes=True) from None
            yield body
        finally:
            self.bytes -= taken


async def parse_requests(
    body: bytearray, options: ServerOptions, *, is_batch: bool, wants_episodes: bool
) -> tuple[list[ScoringRequest], Codec]:
    """Parse the requests in a body, and return them with the codec of their values.

    Episodes are parsed only if the reward uses them.

    Raises:
        RefusedError: If a request is invalid. The message names the field.
    """
    arguments = (body, options, is_batch, wants_episodes)
    if len(body) > _PARSED_IN_A_THREAD:
        return await anyio.to_thread.run_sync(_parse_requests, *arguments)
    return _parse_requests(*arguments)


def _parse_requests(
    body: bytearray, options: ServerOptions, is_batch: bool, wants_episodes: bool
) -> tuple[list[ScoringRequest], Codec]:
    value = _read_json(body)
    if not isinstance(value, dict):
        raise _invalid("(top level): expected an object")
    codec = value.pop("codec", "plain")
    if codec not in ("plain", "typed"):
        raise _invalid('codec: expected "plain" or "typed"')
    rollouts: Any = [value]
    if is_batch:
        rollouts = value.pop("rollouts", None)
        if value:
            raise _invalid(f"{next(iter(value))!r:.60}: unknown key; a batch has rollouts and codec")
        if not isinstance(rollouts, list) or not rollouts:
            raise _invalid("rollouts: expected a list with at least one rollout")
        if len(rollouts) > options.max_batch:
            raise _invalid(
                f"rollouts: the request has {len(rollouts)} rollouts; the maximum is {options.max_batch} (max_batch)"
            )
    requests = []
    for index, rollout in enumerate(rollouts):
        prefix = f"rollouts.{index}." if is_batch else ""
        try:
            if codec == "typed" and isinstance(rollout, Mapping):
                with boundary(EpisodeError, "a value is not encoded as the codec 'typed' requires"):
                    # The values of the episode are already encoded in its record.
                    rollout = {key: v if key == "episode" else from_json_value(v) for key, v in rollout.items()}
            _check_sizes(rollout, options, prefix)
            model = RolloutBody.model_validate(rollout, strict=True)
        except pydantic.ValidationError as error:
            raise _invalid(_describe(error, prefix)) from None
        except EpisodeError as error:
            raise _invalid(f"{prefix or '(top level)'}: {error}") from None
        requests.append(_request(model, index, wants_episodes))
    return requests, codec


def _request(body: RolloutBody, index: int, wants_episode: bool) -> ScoringRequest:
    episode, failure = None, None
    if wants_episode and body.episode is not None:
        try:
            with boundary(EpisodeError, "the episode cannot be read"):
                episode = episode_from_record(body.episode)
        except RewardKitError as error:
            failure = Failure("refused", type(error).__name__, str(error))
    turns = body.assistant_turns
    if turns is None:
        turns = [place for place, message in enumerate(body.messages) if message.role == "assistant"]
    return ScoringRequest(
        rollout_id=body.rollout_id if body.rollout_id is not None else str(index),
        messages=body.messages,
        ground_truth=body.ground_truth,
        assistant_turns=turns,
        sample=body.sample,
        environment_return=body.environment_return,
        stop_reason=body.stop_reason,
        final_state=StateSnapshot(body.state.kind, base64.b64decode(body.state.payload)) if body.state else None,
        failure=failure,
        episode=episode,
        extra=body.extra,
    )


def _check_sizes(rollout: Any, options: ServerOptions, prefix: str) -> None:
    """Reject lists that are too long before validating their items."""
    messages = rollout.get("messages") if isinstance(rollout, dict) else None
    if not isinstance(messages, list):
        return
    if len(messages) > options.max_messages:
        most = f"the maximum is {options.max_messages} (max_messages)"
        raise _invalid(f"{prefix}messages: the rollout has {len(messages)} messages; {most}")
    for index, message in enumerate(messages):
        for name in ("content", "tool_calls"):
            parts = message.get(name) if isinstance(message, dict) else None
            if isinstance(parts, list) and len(parts) > MOST_PARTS:
                raise _invalid(f"{prefix}messages.{index}.{name}: {len(parts)} parts; the maximum is {MOST_PARTS}")


def _describe(error: pydantic.ValidationError, prefix: str) -> str:
    """Describe the errors in a body, field by field. Values are shortened."""
    problems = error.errors(include_url=False)
    lines = []
    for problem in problems[:_MOST_PROBLEMS]:
        field = prefix + ".".join(map(str, problem["loc"])) or "(top level)"
        if problem["type"] in ("extra_forbidden", "missing"):
            lines.append(f"{field}: {'missing' if problem['type'] == 'missing' else 'unknown key'}")
            continue
        value = problem["input"]
        is_short = value is None or isinstance(value, bool | float)
        is_short = is_short or (isinstance(value, int) and value.bit_length() < 200)
        shown = repr(value) if is_short else repr(value[:60]) if isinstance(value, str) else type_name(value)
        lines.append(f"{field}: {problem['msg'].removeprefix('Value error, ')} (got {shown})")
    more = len(problems) - len(lines)
    return "; ".join([*lines, *([f"and {more} more"] if more else [])])


def _invalid(message: str) -> RefusedError:
    return RefusedError(422, "invalid_request", message)


def _read_json(body: bytearray) -> Any:
    """Parse strict JSON, rejecting duplicate keys and lone surrogates."""
    text = ""
    try:
        text = body.decode("utf-8")
        value = _decode(text)
    except UnicodeDecodeError as error:
        raise _not_json(f"the body is not valid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise _not_json("the body is nested too deeply") from None
    except ValueError as error:
        raise _not_json(_first_fault(text) or str(error)[:200]) from None
    if _SURROGATE.search(text):
        for field, leaf in _leaves(value):
            if isinstance(leaf, str) and any("\ud800" <= character <= "\udfff" for character in leaf):
                raise _not_json(f"{field}: a lone surrogate, which is not valid in UTF-8")
    return value


def _not_json(message: str) -> RefusedError:
    return RefusedError(400, "invalid_json", message)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in an object")
    return value


_decode = strict_decoder(_unique).decode


class _Fault(str):
    """A placeholder for a rejected value. It contains the reason."""


def _first_fault(text: str) -> str:
    """Describe the first value that only lenient JSON parsers accept, and its field. If there is none, return ""."""

    def parse_object(pairs: list[tuple[str, Any]]) -> Any:
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        return _Fault(f"the key {twice[0]!r:.60} occurs twice") if twice else dict(pairs)

    def parse_float(number: str) -> Any:
        return 0.0 if math.isfinite(float(number)) else _Fault(f"{number:.40} is out of the range of floats")

    def parse_constant(name: str) -> Any:
        return _Fault(f"{name} is not JSON")

    try:
        value = json.loads(text, object_pairs_hook=parse_object, parse_float=parse_float, parse_constant=parse_constant)
    except (ValueError, RecursionError):
        return ""
    return next((f"{field}: {leaf}" for field, leaf in _leaves(value) if isinstance(leaf, _Fault)), "")


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all leaf values and keys with their fields, in document order."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        field, item = waiting.pop()
        if isinstance(item, dict):
            yield from ((f"{field or '(top level)'}, a key", key) for key in item)
        elif not isinstance(item, list):
            yield field or "(top level)", item
            continue
        inner = item.items() if isinstance(item, dict) else enumerate(item)
        start = f"{field}." if field else ""
        waiting += reversed([(f"{start}{key}"[-_LONGEST_FIELD:], each) for key, each in inner])

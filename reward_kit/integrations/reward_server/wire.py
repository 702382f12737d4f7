"""Requests and answers of a reward server, as models: rollouts to score, scores, and descriptions of rewards.

The fields are those of `ScoringRequest` and `Scored`; the client's side is `reward_agent/remote.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from reward_kit.environments.base import StateSnapshot
from reward_kit.episodes.json_codec import from_json_value, to_json_value
from reward_kit.episodes.record import episode_from_record
from reward_kit.errors import EpisodeError, Failure, RewardKitError, boundary, kind_of
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_agent.remote import AboutBody, AnswerBody
from reward_kit.reward_agent.scoring import Scored, ScoringRequest

Codec = Literal["plain", "typed"]

_BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_RESULT_FIELDS = set(EvaluateResult.model_fields)
_MOST_PROBLEMS = 5
_MOST_BITS = 64
MOST_PARTS = 10_000
"""Content parts, and tool calls, of one message."""


class StateBody(BaseModel):
    """A resource's final state as it is stored."""

    model_config = ConfigDict(strict=True, extra="forbid", title="State")

    kind: str = Field(description='The format of the payload: "json", "sqlite", "files", …')
    payload: str = Field(pattern=_BASE64, description="The payload in base64.")


class RolloutBody(BaseModel):
    """One rollout as a reward function may see it."""

    model_config = ConfigDict(strict=True, extra="forbid", title="Rollout")

    messages: list[Message] = Field(fail_fast=True, description="The whole conversation, in OpenAI chat form.")
    rollout_id: str | None = Field(None, description="Names it in the answer; by default its place in the request.")
    ground_truth: Any = Field(None, description="The sample's.")
    assistant_turns: list[int] | None = Field(
        None,
        fail_fast=True,
        description="The position in messages of each step's message; by default every assistant message is a step.",
    )
    sample: dict[str, Any] = Field(default_factory=dict, description="The sample's row.")
    environment_return: float | None = Field(None, description="The sum of the environment's rewards.")
    stop_reason: str | None = Field(None, description="Why the episode ended.")
    state: StateBody | None = Field(None, description="The final state, for rewards that name it.")
    episode: dict[str, Any] | None = Field(
        None,
        description="A line of episodes.jsonl, for rewards that name step_data; unscored where it cannot be read.",
    )
    extra: dict[str, Any] = Field(default_factory=dict, description="Further named values, such as goal_description.")


class ScoreBody(RolloutBody):
    """A request for one score."""

    model_config = ConfigDict(title="ScoreRequest")

    codec: Codec = Field("plain", description='"typed": values are coded as in episodes.jsonl.')


class BatchBody(BaseModel):
    """A request for several scores; to a batch reward they are one group."""

    model_config = ConfigDict(strict=True, extra="forbid", title="BatchRequest")

    rollouts: list[RolloutBody] = Field(min_length=1)
    codec: Codec = Field("plain", description='"typed": values are coded as in episodes.jsonl.')


class BatchAnswerBody(BaseModel):
    """Scores in the order of the request."""

    model_config = ConfigDict(strict=True, title="Scores")

    scores: list[AnswerBody]


class ListBody(BaseModel):
    """All rewards of a server."""

    model_config = ConfigDict(strict=True, title="Rewards")

    rewards: list[AboutBody]


def decoded(rollout: Any, codec: Any) -> Any:
    """Decode the values of a rollout.

    Raises:
        EpisodeError: one of them is not coded.
    """
    if codec != "typed" or not isinstance(rollout, Mapping):
        return rollout
    with boundary(EpisodeError, "a value is not coded as codec: typed says"):
        # The episode's own values are coded in its record already.
        return {key: value if key == "episode" else from_json_value(value) for key, value in rollout.items()}


def request_of(body: RolloutBody, place: int, *, wants_episode: bool) -> ScoringRequest:
    """Return the request for the score of a rollout.

    Args:
        body: as received.
        place: its index in the request.
        wants_episode: the reward asks for `step_data`.
    """
    episode, failure = None, None
    if wants_episode and body.episode is not None:
        try:
            with boundary(EpisodeError, "the episode cannot be read"):
                episode = episode_from_record(body.episode)
        except RewardKitError as error:
            failure = Failure("refused", type(error).__name__, str(error))
    turns = body.assistant_turns
    if turns is None:
        turns = [index for index, message in enumerate(body.messages) if message.role == "assistant"]
    return ScoringRequest(
        rollout_id=body.rollout_id if body.rollout_id is not None else str(place),
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


def answer_of(scored: Scored, codec: Codec) -> dict[str, Any]:
    """Return the answer for a score, see `AnswerBody`.

    A step index with an absurd number of digits leaves its own rollout unscored.
    """
    steps = (scored.result.step_outputs if scored.result is not None else None) or ()
    if any(isinstance(step.step_index, int) and step.step_index.bit_length() > _MOST_BITS for step in steps):
        message = f"step_outputs: a step_index of more than {_MOST_BITS} bits"
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


def problems_in(error: pydantic.ValidationError, place: str = "") -> str:
    """Describe the problems of a body by field; short values are shown.

    Args:
        error: raised by pydantic.
        place: put before each field, such as "rollouts.3.".
    """
    found = error.errors(include_url=False)
    lines = []
    for problem in found[:_MOST_PROBLEMS]:
        field = place + ".".join(map(str, problem["loc"])) or "(top level)"
        if problem["type"] in ("extra_forbidden", "missing"):
            lines.append(f"{field}: {'missing' if problem['type'] == 'missing' else 'unknown key'}")
            continue
        value = problem["input"]
        is_short = value is None or isinstance(value, bool | float)
        is_short = is_short or (isinstance(value, int) and value.bit_length() < 200)
        shown = repr(value) if is_short else repr(value[:60]) if isinstance(value, str) else kind_of(value)
        lines.append(f"{field}: {problem['msg'].removeprefix('Value error, ')} (got {shown})")
    more = len(found) - len(lines)
    return "; ".join([*lines, *([f"and {more} more"] if more else [])])

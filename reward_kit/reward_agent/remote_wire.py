"""What goes over the wire between a reward server and its clients: rollouts to score, scores, and what a reward is.

The fields are those of `ScoringRequest` and `Scored`. Values are plain JSON; with `codec: "typed"`, values that JSON
does not have (tuples, NaN, bytes, lone surrogates, NumPy arrays) stand in the form of `episodes/json_codec.py`, so that
a reward behind HTTP gets what it would get in process.
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
from reward_kit.errors import EpisodeError, Failure, FailureClass, RewardKitError, boundary, kind_of
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_agent.confined import state_record, steps_record
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.typed_interface import Mode

Codec = Literal["plain", "typed"]

_BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_ALWAYS = frozenset({"messages", "rollout_id", "assistant_turns"})
_OWN_FIELDS = ("ground_truth", "sample", "environment_return", "stop_reason")
_OF_RESULT = set(EvaluateResult.model_fields)
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


class FailureBody(BaseModel):
    """Why there is no score."""

    model_config = ConfigDict(strict=True, title="Failure", populate_by_name=True)

    failure_class: FailureClass = Field(alias="class")
    where: str
    message: str
    traceback: str = ""

    def failure(self) -> Failure:
        """As it is kept on a score."""
        return Failure(self.failure_class, self.where, self.message, self.traceback)


class AnswerBody(BaseModel):
    """One rollout's score, or why it has none. Unscored is null, which is not zero."""

    model_config = ConfigDict(strict=True, title="Score")

    rollout_id: str
    score: float | None = Field(description="null where the rollout is unscored")
    result: EvaluateResult | None = Field(description="What the reward function returned; null where it failed.")
    error: FailureBody | None = Field(description="Why there is no score.")
    duration_s: float = Field(ge=0, description="Of the call, with its wait for a thread or a worker.")
    sandbox: dict[str, str] | None = Field(description="Where the reward ran.")
    stdout: str = ""
    stderr: str = ""
    is_output_cut: bool = False
    retry_after_s: float | None = Field(None, ge=0)


class BatchAnswerBody(BaseModel):
    """Scores in the order of the request."""

    model_config = ConfigDict(strict=True, title="Scores")

    scores: list[AnswerBody]


class AboutBody(BaseModel):
    """What a served reward is."""

    model_config = ConfigDict(strict=True, title="Reward")

    name: str = Field(description="As in its address.")
    id: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")
    mode: Mode = Field(description='"batch": the rollouts of a request are one group, scored in one call.')
    parameters: list[str] | None = Field(description="The values that it is given by name; null: any.")
    required: list[str] = Field(description="Those of them that have no default.")
    level: str = Field(description="Where it runs: in_process, warm or isolated.")
    digest: str = Field(min_length=8, max_length=200, description="Changes when its code or its options do.")
    deadline_s: float | None = Field(gt=0, description="For one call.")
    max_batch: int = Field(ge=1, description="Rollouts in a request.")


class ListBody(BaseModel):
    """All rewards of a server."""

    model_config = ConfigDict(strict=True, title="Rewards")

    rewards: list[AboutBody]


def decoded(rollout: Any, codec: Any) -> Any:
    """A rollout whose values are as they were before they were coded.

    Raises:
        EpisodeError: one of them is no code.
    """
    if codec != "typed" or not isinstance(rollout, Mapping):
        return rollout
    with boundary(EpisodeError, "a value is not coded as codec: typed says"):
        # The episode's own values are coded in its record already.
        return {key: value if key == "episode" else from_json_value(value) for key, value in rollout.items()}


def request_of(body: RolloutBody, place: int, *, wants_episode: bool) -> ScoringRequest:
    """The request for the score of a rollout.

    Args:
        body: what came.
        place: which in its request it is.
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


def rollout_of(request: ScoringRequest, wanted: frozenset[str] | None) -> dict[str, Any]:
    """What is sent of a rollout: what the reward names, typed.

    Args:
        request: the rollout.
        wanted: the parameters of the reward; None for any.

    Raises:
        EpisodeError: a value has no JSON form.
    """
    names = request.names(wanted) | _ALWAYS
    told: dict[str, Any] = {
        "messages": [to_json_value(message.to_chat()) for message in request.messages],
        "rollout_id": to_json_value(request.rollout_id),
        "assistant_turns": [int(turn) for turn in request.assistant_turns],
    }
    for name in sorted(names & {*_OWN_FIELDS}):
        if (value := getattr(request, name)) is not None and name not in request.extra:
            told[name] = to_json_value(dict(value) if name == "sample" else value)
    if "state" in names and (state := state_record(request)) is not None:
        told["state"] = state
    if "step_data" in names and (episode := steps_record(request)) is not None:
        told["episode"] = episode
    if extra := {name: to_json_value(request.extra[name]) for name in names & request.extra.keys()}:
        told["extra"] = extra
    return told


def answer_of(scored: Scored, codec: Codec) -> dict[str, Any]:
    """What is told of a score; `AnswerBody` describes it.

    A step whose index has no end of digits, which nobody could read, leaves its own rollout unscored.
    """
    if any(isinstance(index, int) and index.bit_length() > _MOST_BITS for index in _step_indexes(scored)):
        told = f"step_outputs: a step_index of more than {_MOST_BITS} bits"
        scored = replace(scored, result=None, failure=Failure("invalid_result", "RewardError", told))
    result = scored.result
    answer = {
        "rollout_id": scored.rollout_id,
        "score": scored.score,
        "result": None if result is None else result.model_dump(include=_OF_RESULT),
        "error": scored.failure.to_json() if scored.failure else None,
        "duration_s": max(0.0, scored.duration_s),
        "sandbox": dict(scored.sandbox) if scored.sandbox else None,
        "stdout": scored.stdout,
        "stderr": scored.stderr,
        "is_output_cut": scored.is_output_cut,
        "retry_after_s": scored.retry_after_s,
    }
    return {key: to_json_value(value) for key, value in answer.items()} if codec == "typed" else answer


def _step_indexes(scored: Scored) -> list[int | str]:
    steps = scored.result.step_outputs if scored.result is not None else None
    return [step.step_index for step in steps or ()]


def scored_of(answer: Any, rollout_id: str, duration_s: float) -> Scored:
    """The score that a server tells with `codec: typed`, under the rollout's own name.

    Raises:
        EpisodeError: a value is not coded.
        pydantic.ValidationError: it is no `AnswerBody`.
        ValueError: it is about another rollout, or has neither a score nor an error.
    """
    told = AnswerBody.model_validate(from_json_value(answer), strict=True)
    if told.rollout_id != rollout_id:
        raise ValueError(f"the score of {told.rollout_id!r} in the place of that of {rollout_id!r}")
    if told.error is None and (told.result is None or told.score != told.result.score):
        raise ValueError(f"neither a score nor an error for {rollout_id!r}")
    failure = told.error.failure() if told.error is not None else None
    output = (told.stdout, told.stderr, told.is_output_cut)
    return Scored(rollout_id, told.result, failure, duration_s, told.sandbox, *output, told.retry_after_s)


def problems_in(error: pydantic.ValidationError, place: str = "") -> str:
    """What is wrong with a body, by field; values are shown where they are short.

    Args:
        error: what pydantic raised.
        place: put before each field, such as "rollouts.3.".
    """
    found = error.errors(include_url=False)
    lines = [_problem(problem, place) for problem in found[:_MOST_PROBLEMS]]
    more = len(found) - len(lines)
    return "; ".join([*lines, *([f"and {more} more"] if more else [])])


def _problem(problem: Any, place: str) -> str:
    field = place + ".".join(map(str, problem["loc"])) or "(top level)"
    if problem["type"] == "extra_forbidden":
        return f"{field}: unknown key"
    if problem["type"] == "missing":
        return f"{field}: missing"
    value = problem["input"]
    is_plain = value is None or isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 200)
    shown = repr(value) if is_plain else repr(value[:60]) if isinstance(value, str) else kind_of(value)
    return f"{field}: {problem['msg'].removeprefix('Value error, ')} (got {shown})"

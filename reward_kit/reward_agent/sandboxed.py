"""A reward that is described and called in the sandbox and is never loaded in this process.

This module checks everything that the sandbox returns.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio
import pydantic

from reward_kit.episodes.record import episode_to_record
from reward_kit.errors import (
    FAILURE_CLASSES,
    ConfigError,
    Failure,
    InvalidResultError,
    RewardError,
    RewardKitError,
    boundary,
)
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.scoring import Scored, ScoringRequest, result_error, score_unbroken
from reward_kit.sandbox.host import Sandbox
from reward_kit.sandbox.outcome import Outcome, Strength
from reward_kit.sandbox.program import MOST_RESULT_KB, Limits, Program
from reward_kit.task_parts import SandboxLevel
from reward_kit.typed_interface import EvaluationMode, Origin, as_result
from reward_kit.validation import describe_validation_error

if TYPE_CHECKING:
    from reward_kit.reward_agent.sources import Sources

IsolationLevel = Literal["warm", "isolated"]
_ALWAYS = ("reward_kit.reward_agent.sandbox_worker",)
_FOR = {
    "state": ("reward_kit.environments.snapshots",),
    "step_data": ("reward_kit.agent.models", "reward_kit.episodes.record"),
}
_NOT_OF_STEPS = {"sample", "ground_truth", "custom_data", "timing", "failure", "usage", "start"}
_DESCRIBE_S = 60.0
logger = logging.getLogger("reward_kit.reward_agent")


class RewardDescription(pydantic.BaseModel):
    """The worker's description of the reward. The code of the reward may have tampered with it."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    id: str = pydantic.Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")
    mode: EvaluationMode
    requirements: list[str]
    resources: list[str]
    parameters: list[str] | None
    required: list[str]
    is_async: bool
    sandbox: SandboxLevel | None
    calls_out: bool
    has_end: bool


@dataclass(frozen=True, slots=True)
class SandboxedReward:
    """A reward that runs in the sandbox. See `scoring.Reward` for the first fields.

    Attributes:
        program: the program that calls the reward.
        origin: the reward's file and name.
        resources: the names of its resources. Their values exist only in the sandbox.
        level: the sandbox level, "warm" or "isolated".
        limits: the limits of a call. For a group, the result may be larger. See `limits_for`.
        output: the output that its file produced when it was loaded.
        files: the files that determine the reward's scores: its own file, the user's modules that it imports, and the
            files that it can read.
        options: the keyword arguments that are always passed to the reward. The program also contains them.
    """

    id: str
    mode: EvaluationMode
    requirements: tuple[str, ...]
    parameters: frozenset[str] | None
    required: frozenset[str]
    resources: Mapping[str, None]
    program: Program
    origin: Origin
    level: IsolationLevel
    limits: Limits
    output: str = field(default="", compare=False)
    files: tuple[Path, ...] = field(default=(), compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def limits_for(self, rollouts: int) -> Limits:
        """Return the limits of a call with this many rollouts. Only the size of the result grows with them."""
        # Workers are keyed by limits. Round up to a power of two, so that groups of similar size share a worker.
        result_kb = self.limits.result_kb << (rollouts - 1).bit_length()
        return replace(self.limits, result_kb=min(result_kb, MOST_RESULT_KB))


def worker_program(
    reference: str,
    folder: Path,
    sources: Sources,
    *,
    read_paths: tuple[str, ...] = (),
    preload: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Program:
    """Return the program that loads a reward from its source and describes it."""
    modules = {name: [m.filename, m.text, m.is_package] for name, m in sources.modules.items()}
    try:
        arguments = json.dumps([modules, reference, str(folder), dict(options or {})])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {reference!r}: an option cannot be passed to the sandbox: {error}") from None
    source = (
        "import json\n"
        "from reward_kit.reward_agent.sandbox_worker import WorkerCalls\n"
        f"calls = WorkerCalls(*json.loads({arguments!r}))\n"
        "answer = calls.answer\n"
    )
    imports = tuple(dict.fromkeys((*_ALWAYS, *sorted(sources.imports), *preload)))
    return Program(source, "answer", "<reward-kit>", "plain", imports, read_paths)


def ready_to_score(program: Program, facts: RewardDescription) -> Program:
    """Return the program of a described reward, extended to open and import everything before the first call."""
    names = _FOR.keys() if facts.parameters is None else _FOR.keys() & set(facts.parameters)
    further = [module for name in sorted(names) for module in _FOR[name]]
    return replace(
        program,
        source=f"{program.source}calls.prepare()\n",
        imports=(*program.imports, *further),
        last_call=json.dumps({"close": True}) if facts.has_end else "",
    )


async def describe(program: Program, what: str, limits: Limits) -> tuple[RewardDescription, str]:
    """Load a reward in the sandbox, and return its description and the output of its file.

    Args:
        program: the program from `worker_program`.
        what: the file or the name of the reward in messages.
        limits: the limits of the call.

    Raises:
        ConfigError: If the reward cannot be loaded.
    """
    async with Sandbox(slots=1) as sandbox:
        limits = replace(limits, wall_s=min(limits.wall_s, _DESCRIBE_S))
        outcome = await sandbox.call(program, {"describe": True}, limits=limits)
    if outcome.failure is not None:
        message = f"{what} cannot be loaded in the sandbox: {_with_keys(outcome.failure.message)}"
        raise ConfigError("\n".join(part for part in (message, outcome.failure.traceback) if part))
    answer = outcome.value if isinstance(outcome.value, dict) else {}
    if isinstance(refused := answer.get("refused"), str):
        raise ConfigError(_with_hint(refused))
    try:
        return RewardDescription.model_validate(answer.get("facts")), outcome.stdout + outcome.stderr
    except pydantic.ValidationError as error:
        raise ConfigError(f"{what}: {'; '.join(describe_validation_error(error))}") from None


class SandboxedScorer:
    """A scorer that calls a reward in a sandbox.

    The default is the strongest sandbox that is available, with one slot for each CPU.
    """

    def __init__(
        self, reward: SandboxedReward, *, strength: Strength | Literal["auto"] = "auto", slots: int | None = None
    ) -> None:
        self._reward = reward
        self._sandbox = Sandbox(strength=strength, slots=slots)
        self._wanted = reward.parameters

    @property
    def id(self) -> str:
        return self._reward.id

    @property
    def mode(self) -> EvaluationMode:
        return self._reward.mode

    async def __aenter__(self) -> Self:
        await self._sandbox.__aenter__()
        self._recorded: dict[str, str] = {"level": self._reward.level, "strength": self._sandbox.strength}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._sandbox.__aexit__(kind, error, trace)

    async def score(self, request: ScoringRequest) -> Scored:
        return (await score_unbroken([request], self._score_complete))[0]

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        if self.mode == "pointwise":
            return [await self.score(request) for request in requests]
        return await score_unbroken(requests, self._score_complete)

    async def _score_complete(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        began = time.perf_counter()
        outcome, judged = None, []
        try:
            with boundary(RewardError, f"reward {self._reward.id!r}"):
                outcome = await self._call(self._request(requests))
            judged = self._judged(outcome, len(requests))
        except RewardKitError as error:
            judged = [Failure.from_exception(error)] * len(requests)
        duration_s = time.perf_counter() - began
        output = () if outcome is None else (outcome.stdout, outcome.stderr, outcome.is_output_cut)
        scored = []
        for request, one in zip(requests, judged, strict=True):
            result, failure = (None, one) if isinstance(one, Failure) else (one, None)
            if result is not None:
                invalid = result_error(self._reward.id, result, len(request.assistant_turns))
                failure = None if invalid is None else Failure.from_exception(invalid)
            if failure is not None:
                details = (request.rollout_id, failure.message, failure.traceback)
                logger.info("episode %s cannot be scored: %s\n%s", *details)
            scored.append(Scored(request.rollout_id, result, failure, duration_s, self._recorded, *output))
        return scored

    def _request(self, requests: Sequence[ScoringRequest]) -> dict[str, Any]:
        rollouts = [self._values(request) for request in requests]
        return {"rollouts": rollouts, "is_last": True} if self._reward.level == "isolated" else {"rollouts": rollouts}

    async def _call(self, request: Mapping[str, Any]) -> Outcome:
        """Make a call in a separate task, because a cancelled anyio scope would also cancel its cleanup."""
        reward, limits = self._reward, self._reward.limits_for(len(request["rollouts"]))
        call = asyncio.ensure_future(self._sandbox.call(reward.program, request, limits=limits, level=reward.level))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([call])
            raise

    def _values(self, request: ScoringRequest) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in request.names(self._wanted):
            if name == "messages":
                values[name] = [message.to_chat() for message in request.messages]
            elif name == "state":
                values[name] = state_record(request)
            elif name == "step_data":
                values[name] = steps_record(request)
            else:
                values[name] = request.plain_value(name)
        return values

    def _judged(self, outcome: Outcome, count: int) -> list[EvaluateResult | Failure]:
        """Return the result or the failure of each rollout. The output of the worker is untrusted."""
        if (failure := outcome.failure) is not None:
            message = f"reward {self._reward.id!r}: {_with_keys(failure.message)}"
            return [replace(failure, message=message)] * count
        answer = outcome.value if isinstance(outcome.value, dict) else {}
        results = answer.get("results")
        if answer.keys() != {"results"} or not isinstance(results, list) or len(results) != count:
            return [self._failure(answer)] * count
        judged: list[EvaluateResult | Failure] = []
        for one in results:
            try:
                if isinstance(one, dict) and one.keys() == {"result"}:
                    judged.append(as_result(one["result"], f"reward {self._reward.id!r}"))
                else:
                    judged.append(self._failure(one))
            except InvalidResultError as error:
                judged.append(Failure.from_exception(error))
        return judged

    def _failure(self, answer: Any) -> Failure:
        """Return the failure that the worker reported, or raise an InvalidResultError if its format is invalid."""
        fields = answer.get("failure") if isinstance(answer, dict) and answer.keys() == {"failure"} else None
        names = {"class", "where", "message", "traceback"}
        if (
            not (isinstance(fields, dict) and fields.keys() == names)
            or not all(isinstance(text, str) for text in fields.values())
            or fields["class"] not in FAILURE_CLASSES
        ):
            raise InvalidResultError(f"reward {self._reward.id!r}: the response was not written by the worker")
        failure = Failure.from_json(fields)
        return replace(failure, message=_with_hint(failure.message))


def state_record(request: ScoringRequest) -> dict[str, str] | None:
    """Return the final state of a rollout as JSON data, or None if it has no state."""
    state = request.final_state
    if state is None:
        return None
    return {"kind": state.kind, "payload": base64.b64encode(state.payload).decode("ascii")}


def steps_record(request: ScoringRequest) -> dict[str, Any] | None:
    """Return the record of an episode without the fields that its steps do not use, or None if there is no episode.

    The worker rebuilds the steps from it.
    """
    if request.episode is None:
        return None
    record = episode_to_record(request.episode, final_state={"kind": "", "sha256": ""})
    return {name: value for name, value in record.items() if name not in _NOT_OF_STEPS} | {"final_state": None}


_LIMIT = re.compile(r"raise limits\.(\w+)")
_NOT_FOUND = re.compile(r"No such file or directory: '([^'\n]+)'")
_NOT_PERMITTED = re.compile(r"\[Errno 1\] Operation not permitted|Temporary failure in name resolution")
_NO_VARIABLE = re.compile(r"KeyError: '([A-Za-z_]\w*)'")
_WAY_OUT = "if the reward needs them, run it with --sandbox in_process"


def _with_keys(message: str) -> str:
    """Replace the names of limits with task file keys, and add a hint if one applies."""

    def key_of_task(match: re.Match[str]) -> str:
        name = match.group(1)
        return "raise limits.reward_time_s" if name == "wall_s" else f"raise sandbox.limits.{name}"

    return _with_hint(_LIMIT.sub(key_of_task, message))


def _with_hint(message: str) -> str:
    """Add the likely cause of an error, such as a hidden file or a variable that is not set in the sandbox."""
    hint = ""
    if match := _NOT_FOUND.search(message):
        path = Path(match.group(1))
        if not path.is_absolute():
            hint = (
                "the sandbox runs in an empty directory: open the file by its absolute path, such as "
                f"Path(__file__).parent / {match.group(1)!r}, and add it to sandbox.read_paths"
            )
        elif path.exists():
            hint = "the file exists but is hidden in the sandbox; add the file to sandbox.read_paths"
    elif _NOT_PERMITTED.search(message):
        hint = f"the sandbox has no network and starts no processes; {_WAY_OUT}"
    elif (match := _NO_VARIABLE.search(message)) and match.group(1) in os.environ:
        hint = f"your environment variables are not set in the sandbox; {_WAY_OUT}"
    return f"{message}; {hint}" if hint else message

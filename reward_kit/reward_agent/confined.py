"""What a message from behind the walls does not say itself: which wall was met, and which key moves it."""

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
from reward_kit.reward_agent.scoring import Scored, ScoringRequest, error_of, scored_together
from reward_kit.sandbox.host import Sandbox
from reward_kit.sandbox.limits import MOST_RESULT_KB, Limits
from reward_kit.sandbox.outcome import Outcome, Strength
from reward_kit.sandbox.program import Program
from reward_kit.task_parts import SandboxLevel
from reward_kit.typed_interface import Mode, Origin, as_result
from reward_kit.validation import describe_validation_error

if TYPE_CHECKING:
    from reward_kit.reward_agent.package_environment import PackageEnvironment
    from reward_kit.reward_agent.sources import Sources

_LIMIT = re.compile(r"raise limits\.(\w+)")

_UNSEEN = re.compile(r"No such file or directory: '([^'\n]+)'")

_REFUSED = re.compile(r"\[Errno 1\] Operation not permitted|Temporary failure in name resolution")

_VARIABLE = re.compile(r"KeyError: '([A-Za-z_]\w*)'")

_WAY_OUT = "what needs them runs with --sandbox in_process"

_NO_NETWORK = f"the sandbox has no network and starts no processes: {_WAY_OUT}"

_NO_VARIABLES = f"the sandbox has none of your environment variables: {_WAY_OUT}"

_NOT_SHOWN = "it is there and not shown in the sandbox: name it in sandbox.read_paths"

_RELATIVE = (
    "the sandbox works in an empty folder: open it by its whole path, such as Path(__file__).parent / {0!r}, and name "
    "it in sandbox.read_paths"
)


def with_keys(message: str) -> str:
    """A limit's message with the keys of a task file, and a hint where there is one."""
    return with_hint(_LIMIT.sub(_key_of_task, message))


def with_hint(message: str) -> str:
    """Say which wall it was where a file is only not shown, or a network, a process or a variable is asked for."""
    hint = _hint(message)
    return f"{message}; {hint}" if hint else message


def _hint(message: str) -> str:
    if found := _UNSEEN.search(message):
        path = Path(found.group(1))
        if not path.is_absolute():
            return _RELATIVE.format(found.group(1))
        return _NOT_SHOWN if path.exists() else ""
    if _REFUSED.search(message):
        return _NO_NETWORK
    found = _VARIABLE.search(message)
    return _NO_VARIABLES if found and found.group(1) in os.environ else ""


def _key_of_task(found: re.Match[str]) -> str:
    name = found.group(1)
    return "raise limits.reward_time_s" if name == "wall_s" else f"raise sandbox.limits.{name}"


ConfinedLevel = Literal["warm", "isolated"]

_ALWAYS = ("reward_kit.reward_agent.preloaded",)

_FOR = {
    "state": ("reward_kit.environments.snapshots",),
    "step_data": ("reward_kit.agent.models", "reward_kit.episodes.record"),
}

_NOT_OF_STEPS = {"sample", "ground_truth", "custom_data", "timing", "failure", "usage", "start"}

_DESCRIBE_S = 60.0

logger = logging.getLogger("reward_kit.reward_agent")


class Facts(pydantic.BaseModel):
    """What the worker says of a reward, whose own code may have had a hand in it."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    id: str = pydantic.Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")
    mode: Mode
    requirements: list[str]
    resources: list[str]
    parameters: list[str] | None
    required: list[str]
    is_async: bool
    sandbox: SandboxLevel | None
    calls_out: bool
    has_end: bool


@dataclass(frozen=True, slots=True)
class ConfinedReward:
    """What is known of a reward that runs behind walls.

    Attributes:
        program: calls it.
        origin: where it was written.
        facts: what it said of itself.
        level: "warm" or "isolated".
        limits: of one call, of a rollout or of a group; the result of a group may be larger, see `limits_for`.
        output: what its file printed when it was loaded.
        environment: the packages that it sees; None for those of the running interpreter.
        files: what decides its scores on this machine: its file and the user's own modules that it imports, and what it
            may read.
        options: its keyword parameters that are fixed; the program holds them too.
    """

    program: Program
    origin: Origin
    facts: Facts
    level: ConfinedLevel
    limits: Limits
    output: str = field(default="", compare=False)
    environment: PackageEnvironment | None = None
    files: tuple[Path, ...] = field(default=(), compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def id(self) -> str:
        """Names the reward in files."""
        return self.facts.id

    @property
    def mode(self) -> Mode:
        """Whether it scores rollouts one by one or groups of them."""
        return self.facts.mode

    @property
    def requirements(self) -> tuple[str, ...]:
        """Packages it needs of the running interpreter; none where it has an environment of its own."""
        return () if self.environment is not None else tuple(self.facts.requirements)

    @property
    def resources(self) -> Mapping[str, None]:
        """The names of its resources; what they are is known inside only."""
        return dict.fromkeys(self.facts.resources)

    @property
    def parameters(self) -> frozenset[str] | None:
        """The names it takes; None where it takes any."""
        return None if self.facts.parameters is None else frozenset(self.facts.parameters)

    @property
    def required(self) -> frozenset[str]:
        """Those of them that have no default."""
        return frozenset(self.facts.required)

    def limits_for(self, rollouts: int) -> Limits:
        """Of a call for so many rollouts: the size of the result is for each of them, all else for the call."""
        # To the next power of two: workers are kept by their limits, and groups that lost a rollout can share one.
        result_kb = self.limits.result_kb << (rollouts - 1).bit_length()
        return replace(self.limits, result_kb=min(result_kb, MOST_RESULT_KB))


def program_of(
    reference: str,
    folder: Path,
    sources: Sources,
    *,
    read_paths: tuple[str, ...] = (),
    preload: tuple[str, ...] = (),
    library_path: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Program:
    """The program that loads a reward from text and describes it; `ready_to_score` makes the one that calls it.

    Raises:
        ConfigError: an option has no JSON form.
    """
    modules = {name: [m.filename, m.text, m.is_package] for name, m in sources.modules.items()}
    try:
        told = json.dumps([modules, reference, str(folder), dict(options or {})])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {reference!r}: an option cannot be handed through its walls: {error}") from None
    source = (
        "import json\n"
        "from reward_kit.reward_agent.inside import ConfinedCalls\n"
        f"calls = ConfinedCalls(*json.loads({told!r}))\n"
        "answer = calls.answer\n"
    )
    imports = (*_ALWAYS, *sorted(sources.imports), *preload)
    wanted = tuple(dict.fromkeys(imports))
    return Program(source, "answer", "<reward-kit>", "plain", wanted, read_paths, library_path=library_path)


def ready_to_score(program: Program, facts: Facts) -> Program:
    """The program of a described reward: it opens what calls need, and has imported what they need."""
    names = _FOR.keys() if facts.parameters is None else _FOR.keys() & set(facts.parameters)
    further = [module for name in sorted(names) for module in _FOR[name]]
    return replace(
        program,
        source=f"{program.source}calls.prepare()\n",
        imports=(*program.imports, *further),
        last_call=json.dumps({"close": True}) if facts.has_end else "",
    )


async def describe(program: Program, what: str, limits: Limits) -> tuple[Facts, str]:
    """Load a reward in the sandbox and ask what it is; with what its file printed meanwhile.

    Raises:
        ConfigError: it cannot be loaded, or its signature cannot be called.
    """
    async with Sandbox(slots=1) as sandbox:
        limits = replace(limits, wall_s=min(limits.wall_s, _DESCRIBE_S))
        outcome = await sandbox.call(program, {"describe": True}, limits=limits)
        facts = _facts(outcome, what)
    return facts, outcome.stdout + outcome.stderr


def _facts(outcome: Outcome, what: str) -> Facts:
    if outcome.failure is not None:
        message = f"{what} cannot be loaded in the sandbox: {with_keys(outcome.failure.message)}"
        raise ConfigError("\n".join(part for part in (message, outcome.failure.traceback) if part))
    answer = outcome.value if isinstance(outcome.value, dict) else {}
    if isinstance(refused := answer.get("refused"), str):
        raise ConfigError(with_hint(refused))
    try:
        return Facts.model_validate(answer.get("facts"))
    except pydantic.ValidationError as error:
        raise ConfigError(f"{what}: {'; '.join(describe_validation_error(error))}") from None


class ConfinedScorer:
    """Calls a reward behind walls. Use it as an async context manager; workers are started as they are needed.

    Args:
        reward: the reward.
        strength: which walls; by default the strongest that this machine has.
        slots: calls at once; by default the number of CPUs.
    """

    def __init__(
        self, reward: ConfinedReward, *, strength: Strength | Literal["auto"] = "auto", slots: int | None = None
    ) -> None:
        self._reward = reward
        self._sandbox = Sandbox(strength=strength, slots=slots)
        self._wanted = reward.parameters

    @property
    def mode(self) -> Mode:
        """As `Scorer`."""
        return self._reward.mode

    async def __aenter__(self) -> Self:
        await self._sandbox.__aenter__()
        self._told: dict[str, str] = {"level": self._reward.level, "strength": self._sandbox.strength}
        if self._reward.environment is not None:
            self._told["environment"] = self._reward.environment.id
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._sandbox.__aexit__(kind, error, trace)

    async def score(self, request: ScoringRequest) -> Scored:
        """As `Scorer`. A rollout that broke is not scored: its failure is the answer."""
        return (await scored_together([request], self._score_whole))[0]

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """As `Scorer`."""
        if self.mode == "pointwise":
            return [await self.score(request) for request in requests]
        return await scored_together(requests, self._score_whole)

    async def _score_whole(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """One call for rollouts that did not break."""
        began = time.perf_counter()
        outcome, judged = None, []
        try:
            with boundary(RewardError, f"reward {self._reward.id!r}"):
                outcome = await self._call(self._request(requests))
            judged = self._judged(outcome, len(requests))
        except RewardKitError as error:
            judged = [Failure.from_exception(error)] * len(requests)
        duration_s = time.perf_counter() - began
        return [self._scored(*pair, duration_s, outcome) for pair in zip(requests, judged, strict=True)]

    def _scored(
        self, request: ScoringRequest, judged: EvaluateResult | Failure, duration_s: float, outcome: Outcome | None
    ) -> Scored:
        result, failure = (None, judged) if isinstance(judged, Failure) else (judged, None)
        if result is not None and (error := error_of(self._reward.id, result, len(request.assistant_turns))):
            failure = Failure.from_exception(error)
        if failure is not None:
            logger.info("episode %s cannot be scored: %s\n%s", request.rollout_id, failure.message, failure.traceback)
        if outcome is None:
            return Scored(request.rollout_id, result, failure, duration_s, self._told)
        output = (outcome.stdout, outcome.stderr, outcome.is_output_cut)
        return Scored(request.rollout_id, result, failure, duration_s, self._told, *output)

    async def _call(self, request: Mapping[str, Any]) -> Outcome:
        """The call, in a task of its own: a cancelled scope of anyio cancels again and again, also what cleans up."""
        reward, limits = self._reward, self._reward.limits_for(len(request["rollouts"]))
        call = asyncio.ensure_future(self._sandbox.call(reward.program, request, limits=limits, level=reward.level))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([call])
            raise

    def _request(self, requests: Sequence[ScoringRequest]) -> dict[str, Any]:
        rollouts = [self._values(request) for request in requests]
        return {"rollouts": rollouts, "is_last": True} if self._reward.level == "isolated" else {"rollouts": rollouts}

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
        """What the outcome is worth to each rollout: the worker's word is checked as a stranger's."""
        if (failure := outcome.failure) is not None:
            message = f"reward {self._reward.id!r}: {with_keys(failure.message)}"
            return [replace(failure, message=message)] * count
        answer = outcome.value if isinstance(outcome.value, dict) else {}
        results = answer.get("results")
        if answer.keys() == {"results"} and isinstance(results, list) and len(results) == count:
            return [self._judged_one(told) for told in results]
        return [self._failure(answer)] * count

    def _judged_one(self, told: Any) -> EvaluateResult | Failure:
        try:
            if isinstance(told, dict) and told.keys() == {"result"}:
                return as_result(told["result"], f"reward {self._reward.id!r}")
            return self._failure(told)
        except InvalidResultError as error:
            return Failure.from_exception(error)

    def _failure(self, told: Any) -> Failure:
        """The failure that the worker told.

        Raises:
            InvalidResultError: it told none.
        """
        if not (isinstance(told, dict) and told.keys() == {"failure"} and _is_failure(told["failure"])):
            raise InvalidResultError(f"reward {self._reward.id!r}: the answer was not written by the worker")
        failure = Failure.from_json(told["failure"])
        return replace(failure, message=with_hint(failure.message))


def _is_failure(told: Any) -> bool:
    names = {"class", "where", "message", "traceback"}
    if not (isinstance(told, dict) and told.keys() == names and all(isinstance(text, str) for text in told.values())):
        return False
    return told["class"] in FAILURE_CLASSES


def state_record(request: ScoringRequest) -> dict[str, str] | None:
    """The final state of a rollout in JSON."""
    state = request.final_state
    if state is None:
        return None
    return {"kind": state.kind, "payload": base64.b64encode(state.payload).decode("ascii")}


def steps_record(request: ScoringRequest) -> dict[str, Any] | None:
    """The episode as its line in a file, from which the worker makes the steps; without what no step shows."""
    if request.episode is None:
        return None
    record = episode_to_record(request.episode, final_state={"kind": "", "sha256": ""})
    return {name: value for name, value in record.items() if name not in _NOT_OF_STEPS} | {"final_state": None}

"""Building blocks of the reward check: recorded calls, questions with known answers, and the report."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reward_kit.checks.call_recorder import CallRecorder
from reward_kit.checks.findings import LEVELS, Finding, Level, Report
from reward_kit.checks.reward_cases import (
    FORMS,
    QUESTION,
    Form,
    is_tool_call,
    make_request,
    said,
    tool_answer,
    truth_positions,
    truth_text,
    user,
    with_messages,
    wrong_values,
)
from reward_kit.checks.source_facts import SourceFacts
from reward_kit.display_text import one_line, pluralize, truncate
from reward_kit.errors import ConfigError, Failure
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_agent.in_process import InProcessScorer
from reward_kit.reward_agent.sandboxed import SandboxedReward, SandboxedScorer
from reward_kit.reward_agent.scoring import Reward, Scored, ScoringRequest
from reward_kit.sandbox.outcome import Outcome
from reward_kit.typed_interface import RewardSpec

LITTLE = 1e-6
"""Scores whose difference is smaller than this value count as equal."""
_PLAIN_CALLS = "from reward_kit.reward_agent.sandbox_worker import WorkerCalls\n"
_WATCHED_CALLS = "from reward_kit.checks.call_recorder import RecordedWorkerCalls as WorkerCalls\n"
ATTACK_CPU_S = 1.0
"""The CPU time limit of a call that may never return, in seconds."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of a call to the reward."""

    score: float | None  # None if the rollout is unscored
    failure: Failure | None = None  # The reason why it is unscored
    result: EvaluateResult | None = None
    wall_s: float = 0.0  # Duration of the call alone, measured in the worker; 0 if the call did not return
    cpu_s: float = 0.0  # CPU time, measured in the same way
    peak_mb: float = 0.0  # The peak memory of the call in MiB, if requested
    changed: Mapping[str, str] = field(default_factory=dict)  # The changed inputs, each with its change
    events: tuple[
        tuple[str, str], ...
    ] = ()  # The files, variables, network addresses and programs used, as (kind, name)

    @property
    def text(self) -> str:
        """The score as a string, or the reason why the rollout is unscored."""
        if self.score is not None:
            return f"{self.score:.4g}"
        return f"unscored ({self.failure.message if self.failure else 'no reason'})"


class LocalBench(InProcessScorer):
    """A bench that calls a reward in this process. It does not support new workers or CPU time limits."""

    is_confined = False
    level = "in_process"

    def __init__(self, spec: RewardSpec, deadline_s: float | None) -> None:
        self.parameters = spec.parameters
        self._watch = CallRecorder()
        super().__init__(self._watch.wrap(spec), deadline_s)

    async def see(self, request: ScoringRequest, *, memory: bool = False, **_: object) -> CallOutcome:
        """Call the reward. All options of `SandboxedBench.see` except `memory` are ignored."""
        self._watch.observed, self._watch.wants_memory = None, memory
        scored = await self.score(request)
        return _seen(scored, self._watch.observed)


class SandboxedBench(SandboxedScorer):
    """A bench that calls a reward in the sandbox."""

    is_confined = True

    def __init__(self, reward: SandboxedReward) -> None:
        source = reward.program.source
        if _PLAIN_CALLS not in source:
            raise ConfigError(f"reward {reward.id!r} runs an external program; only Python rewards can be checked")
        watched = replace(reward.program, source=source.replace(_PLAIN_CALLS, _WATCHED_CALLS, 1))
        watched = replace(watched, imports=(*watched.imports, "reward_kit.checks.call_recorder"))
        super().__init__(replace(reward, program=watched), slots=2)
        self.parameters, self.level = reward.parameters, reward.level
        self._base = self._reward
        self._look: dict[str, bool] = {}
        self._observed: Any = None

    async def see(
        self,
        request: ScoringRequest,
        *,
        worker: int = 0,
        memory: bool = False,
        is_fresh: bool = False,
        cpu_s: float | None = None,
    ) -> CallOutcome:
        """Call the reward. Calls must not overlap.

        Args:
            request: the rollout to score.
            worker: the index of the worker to use. Each worker has its own interpreter.
            memory: whether to measure the peak memory. The measurement slows the call down.
            is_fresh: whether to use a new worker.
            cpu_s: the CPU time limit of the call in seconds, if it is lower than the reward's own limit.
        """
        limits = self._base.limits
        if cpu_s is not None:
            limits = replace(limits, cpu_s=min(cpu_s, limits.cpu_s))
        # Workers are also keyed by their limits, so a slightly longer limit selects a different worker.
        limits = replace(limits, wall_s=limits.wall_s + worker / 1024)
        self._reward = replace(self._base, limits=limits, level="isolated" if is_fresh else self._base.level)
        self._look, self._observed = {"memory": memory, "inputs": not memory and cpu_s is None}, None
        return _seen(await self.score(request), self._observed)

    def _request(self, requests: Sequence[ScoringRequest]) -> dict[str, Any]:
        return {**super()._request(requests), "watch": self._look}

    async def _call(self, request: Mapping[str, Any]) -> Outcome:
        outcome = await super()._call(request)
        if not isinstance(outcome.value, dict):
            return outcome
        self._observed = outcome.value.get("watched")
        return replace(outcome, value={name: item for name, item in outcome.value.items() if name != "watched"})


Bench = LocalBench | SandboxedBench


def bench_for(reward: Reward, deadline_s: float | None) -> Bench:
    """Return a bench that calls a reward and records the calls. The bench is an async context manager."""
    if isinstance(reward, RewardSpec):
        return LocalBench(reward, deadline_s)
    if isinstance(reward, SandboxedReward):
        return SandboxedBench(reward)
    raise ConfigError(f"reward {reward.id!r} is served over HTTP; check it on its server")


def _seen(scored: Scored, watched: Any) -> CallOutcome:
    """Return the outcome of a call. It includes the valid parts of the untrusted record `watched`."""
    watched = watched if isinstance(watched, dict) else {}
    numbers = {}
    for name in ("wall_s", "cpu_s", "peak_mb"):
        value = watched.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        numbers[name] = float(value) if is_number else 0.0
    changed, events = watched.get("changed"), watched.get("events")
    pairs = (
        [one for one in events if isinstance(one, list | tuple) and len(one) == 2] if isinstance(events, list) else []
    )
    return CallOutcome(
        scored.score,
        scored.failure,
        scored.result,
        **numbers,
        changed={str(k): str(v)[:300] for k, v in changed.items()} if isinstance(changed, dict) else {},
        events=tuple((str(kind), str(what)[:300]) for kind, what in pairs),
    )


_TEXTS = ("42", "1000", "Paris", "A")
_CALL = {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}
_OTHERS: tuple[Any, ...] = (_CALL, ["red", "green", "blue"])
"""Ground truths to try if the type annotation is missing and the reward rejects strings."""
_BY_ANNOTATION: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("list[int]", ([3, 1, 2],)),
    ("list[float]", ([3.5, 1.0, 2.0],)),
    ("list[dict", ([_CALL],)),
    ("list", (["red", "green", "blue"],)),
    ("dict", (_CALL,)),
    ("Mapping", (_CALL,)),
    ("str", _TEXTS),
    ("float", (2.5, 1000.0)),
    ("int", (42, 1000)),
    ("bool", (True,)),
)


@dataclass(slots=True)
class BenchQuestion:
    """A question, its ground truth, its known answers and their scores."""

    blank: ScoringRequest  # The rollout without an answer, as if the agent did nothing
    truth: Any = None  # The ground truth; None if the reward takes no ground truth
    gold: ScoringRequest | None = None  # A correct rollout; None if unknown
    is_given: bool = False  # True if the user supplied the correct answer; otherwise, it was found by trial
    is_truth_given: bool = True  # True if the user supplied the truth; otherwise, it was generated from the annotation
    form: Form | None = None  # The form of an answer; None if unknown or if the answer is not text
    wrong: Sequence[Any] = ()
    gold_seen: CallOutcome | None = None
    floor: float | None = None  # The best score of a wrong answer in the same form; None if no such answer was scored
    was_scored: bool = False
    alike: str = ""  # A form in which a wrong answer earned as much as the correct one, with its score, or ""

    @property
    def gold_score(self) -> float | None:
        """The score of the correct rollout, or None if it is unscored or unknown."""
        return self.gold_seen.score if self.gold_seen is not None else None

    @property
    def separates_answers(self) -> bool:
        """True if the correct rollout earns more than the wrong answers."""
        return self.gold_score is not None and self.floor is not None and self.gold_score > self.floor + LITTLE

    def answered(self, text: str | None, before: Sequence[Message] = ()) -> ScoringRequest:
        """Return the rollout with the messages `before`, followed by this answer."""
        return with_messages(self.blank, (*self.blank.messages, *before, said(text)))

    def written(self, value: Any) -> str:
        """Return a value in the form that the reward expects."""
        return self.form.write(truth_text(value)) if self.form is not None else truth_text(value)


@dataclass(frozen=True, slots=True)
class Given:
    """The answers, ground truths and rollouts that the user provided."""

    truths: Sequence[Any] = ()
    golds: Sequence[str] = ()  # Correct answers: one per truth, or any number if the reward takes no truth
    rollouts: Sequence[ScoringRequest] = ()  # Transcripts; the `gold_answer` of a row counts as correct
    ends: Sequence[tuple[ScoringRequest, ScoringRequest]] = ()  # A correct rollout, and one that does nothing

    def __post_init__(self) -> None:
        if self.golds and self.truths and len(self.golds) != len(self.truths):
            raise ConfigError(
                f"got {len(self.truths)} ground truths, but {len(self.golds)} correct answers; pass one --gold for "
                "each --ground-truth"
            )


def build_questions(given: Given, annotation: str, *, takes_truth: bool, most: int = 4) -> list[BenchQuestion]:
    """Create the questions for a reward from the user's inputs or from the ground truth's annotation."""
    if given.ends:
        pairs = given.ends[:most]
        return [BenchQuestion(_before_answer(nothing), right.ground_truth, right, True) for right, nothing in pairs]
    if given.rollouts and not given.truths:
        questions = []
        for rollout in given.rollouts[:most]:
            question = BenchQuestion(_before_answer(rollout), rollout.ground_truth)
            gold = rollout.sample.get("gold_answer")
            if isinstance(gold, str):
                question.gold, question.is_given = question.answered(gold), True
            questions.append(question)
        return questions
    if not takes_truth:
        return [_make_question(None, gold) for gold in given.golds or (None,)]
    if given.truths:
        answers: Sequence[str | None] = given.golds or [None] * len(given.truths)
        return [_make_question(truth, gold) for truth, gold in zip(given.truths, answers, strict=True)]
    # Use strings if the annotation specifies no type or allows strings.
    truths: Sequence[Any] = _TEXTS
    if "str" not in (part.strip() for part in annotation.split("|")):
        truths = next((own for name, own in _BY_ANNOTATION if name.lower() in annotation.lower()), _TEXTS)
    return [_make_question(truth, is_truth_given=False) for truth in truths]


def _make_question(truth: Any, gold: str | None = None, *, is_truth_given: bool = True) -> BenchQuestion:
    blank = make_request((user(QUESTION),), truth, environment_return=0.0)
    question = BenchQuestion(blank, truth, is_truth_given=is_truth_given)
    if gold is not None:
        question.gold, question.is_given = replace(question.answered(gold), environment_return=1.0), True
    return question


def _before_answer(rollout: ScoringRequest) -> ScoringRequest:
    """Return the rollout without its last answer and without the messages after that answer."""
    turns = [position for position, message in enumerate(rollout.messages) if message.role == "assistant"]
    return with_messages(rollout, rollout.messages[: turns[-1]] if turns else rollout.messages)


async def learned(
    given: Given, annotation: str, bench: Bench, chance: random.Random, *, takes_truth: bool
) -> list[BenchQuestion]:
    """Create the questions for a reward, and score their answers.

    Returns:
        The questions, or [] if the reward rejects all generated ground truths.
    """
    questions = build_questions(given, annotation, takes_truth=takes_truth)
    for question in questions:
        await _learn(question, bench, chance)
    if all(question.is_truth_given for question in questions):
        return questions
    if not any(question.was_scored for question in questions) and annotation in ("", "Any", "object", "typing.Any"):
        questions = [_make_question(truth, is_truth_given=False) for truth in _OTHERS]
        for question in questions:
            await _learn(question, bench, chance)
    return [question for question in questions if question.was_scored]


async def _learn(question: BenchQuestion, bench: Bench, chance: random.Random) -> None:
    """Find the answer form that the reward expects, and score a correct answer and wrong answers in that form."""
    question.wrong = wrong_values(question.truth, chance) if question.truth is not None else ()
    if question.gold is None and is_tool_call(question.truth):
        messages = (*question.blank.messages, tool_answer(question.truth))
        question.gold, question.is_given = with_messages(question.blank, messages), question.is_truth_given
    if question.gold is not None:
        question.gold_seen = await bench.see(question.gold)
        question.form = _given_form(question.gold, question.truth)
        question.floor = await _floor(question, bench)
        question.was_scored = question.gold_score is not None or question.floor is not None
        return
    best = 0.0
    for form in FORMS if question.truth is not None else ():
        tried = replace(question, form=form)
        tried.gold = tried.answered(tried.written(question.truth))
        tried.gold_seen = await bench.see(tried.gold)
        question.was_scored |= tried.gold_score is not None
        if tried.gold_score is None or tried.gold_score <= best + LITTLE:
            continue
        tried.floor = await _floor(tried, bench)
        if tried.floor is None:
            continue  # An unscored wrong answer is a separate finding, not evidence about this form
        if not tried.separates_answers:
            question.alike = (
                f"{tried.written(question.truth)[:60]}: {tried.gold_score:.4g}, the same score that wrong answers get"
            )
        else:
            best = tried.gold_score
            question.form, question.gold, question.gold_seen, question.floor = (
                form,
                tried.gold,
                tried.gold_seen,
                tried.floor,
            )
        if best >= 1.0 - LITTLE:
            return


async def _floor(question: BenchQuestion, bench: Bench) -> float | None:
    """Return the highest score that a wrong answer in the same form gets."""
    texts = [question.written(value) for value in question.wrong] or ["I do not know."]
    seen = [await bench.see(question.answered(text)) for text in texts]
    return max((one.score for one in seen if one.score is not None), default=None)


def _given_form(gold: ScoringRequest, truth: Any) -> Form | None:
    """Return the form of the user's correct answer.

    If the answer does not contain the ground truth exactly once, return None.
    """
    if truth is None:
        return None
    text = gold.messages[-1].text if gold.messages else ""
    if len(places := list(truth_positions(truth, text))) != 1:
        return None
    ((begin, end),) = places
    before, after = text[:begin], text[end:]
    if not (before + after).strip():
        return FORMS[0]
    return Form("the form of the given answer", lambda value: f"{before}{value}{after}")


@dataclass(slots=True)
class RewardReport(Report):
    """The report on a reward. It contains all findings."""

    examples: int | None = None
    level: str = ""
    seed: int = 0
    unchecked: dict[str, str] = field(default_factory=dict)  # Checks that were not possible, with the reason
    facts: dict[str, Any] = field(default_factory=dict)  # Measurements by name

    def note(
        self,
        kind: str,
        level: Level,
        message: str,
        evidence: Iterable[str] | None = None,
        *,
        most: int = 4,
        reproduction: str = "",
    ) -> None:
        """Add a finding with at most `most` lines of evidence.

        If `evidence` is given but empty, no finding is added.
        """
        lines = tuple(dict.fromkeys(evidence or ()))[:most]
        if lines or evidence is None:
            self.add([Finding(level, kind, message, evidence=lines, reproduction=reproduction)])

    def drop(self, findings: Sequence[Finding]) -> None:
        """Remove findings."""
        self.findings = [finding for finding in self.findings if finding not in findings]
        self.counts = Counter((finding.level, finding.kind) for finding in self.findings)

    def cannot(self, check: str, why: str) -> None:
        """Record that a check is not possible. Only the first reason is kept."""
        self.unchecked.setdefault(check, why)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-serializable data."""
        return {
            "reward": self.target,
            "level": self.level,
            "seed": self.seed,
            "counts": {level: self.count(level) for level in LEVELS},
            "findings": [
                {
                    **{"code": f.kind, "severity": f.level, "message": f.message, "evidence": list(f.evidence)},
                    **{key: text for key in ("reproduction", "fix") if (text := getattr(f, key))},
                }
                for f in self._worst_first()
            ],
            "unchecked": [{"check": check, "why": why} for check, why in self.unchecked.items()],
            "facts": self.facts,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report for a terminal, sorted by level."""
        for finding in self._worst_first():
            yield f"{finding.level + ':':9}{finding.kind}: {finding.message}"
            yield from (f"           {quoted(line, 160)}" for line in finding.evidence)
            if finding.reproduction:
                yield f"           shortest: {quoted(finding.reproduction, 300)}"
            if finding.fix:
                yield f"           fix: {finding.fix}"
        for name, fact in self.facts.items():
            text = fact if isinstance(fact, str) else one_line(json.dumps(fact, ensure_ascii=False))
            yield f"{'fact:':9}{name}: {text}"
        for check, why in self.unchecked.items():
            yield f"{'not checked:':13}{check}: {why}"
        left = f", {pluralize(len(self.unchecked), 'check')} not possible" if self.unchecked else ""
        yield f"{self.target}: {self.verdict()}{left} (run {self.level}, seed {self.seed})"

    def _worst_first(self) -> list[Finding]:
        return sorted(self.findings, key=lambda finding: LEVELS.index(finding.level))


def quoted(text: str, limit: int) -> str:
    """Return a string on one line, shortened to about `limit` characters, without terminal control sequences."""
    return one_line(truncate(text, limit))


@dataclass(slots=True)
class CheckContext:
    """The state of a reward check."""

    bench: Bench
    report: RewardReport
    source: SourceFacts
    chance: random.Random
    questions: list[BenchQuestion]  # At least one
    rollouts: Sequence[ScoringRequest] = ()
    scores: dict[str, CallOutcome] = field(default_factory=dict)  # By the name of the rollout
    events: dict[tuple[str, str], None] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)  # The changed inputs, each with its change
    early: list[tuple[ScoringRequest, float | None]] = field(default_factory=list)  # The first scores

    @property
    def first(self) -> BenchQuestion:
        """The question that most probes use.

        If possible, it is a question whose correct answer earns more than wrong answers.
        """
        return next((question for question in self.questions if question.separates_answers), self.questions[0])

    @property
    def known(self) -> list[BenchQuestion]:
        """The questions whose correct answer earns more than wrong answers."""
        return [question for question in self.questions if question.separates_answers]

    async def see(self, name: str, request: ScoringRequest) -> CallOutcome:
        """Call the reward, and store the outcome under `name`."""
        self.scores[name] = seen = await self.bench.see(request)
        self.events.update(dict.fromkeys(seen.events))
        for what, how in seen.changed.items():
            self.changed.setdefault(what, how)
        return seen


def takes_truth(parameters: frozenset[str] | None) -> bool:
    """Return True if a reward with these parameters takes the ground truth.

    None means that all parameters are accepted.
    """
    return parameters is None or bool(parameters & {"ground_truth", "ground_truths"})


Probe = Callable[[CheckContext], Awaitable[None]]


def evidence(name: str, seen: CallOutcome, text: str | None = None) -> str:
    """Return a line of evidence for `RewardReport.note` that shows the rollout, its answer and its score."""
    answer = f' "{quoted(text, 60)}"' if text is not None else ""
    return f"{name}{answer}: {seen.text}"

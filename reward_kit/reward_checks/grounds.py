"""What is known to be right: ground truths, answers that are right and wrong, and what a reward gives for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.reward_checks.answers import FORMS, Form, is_tool_call, places_of, text_of, tool_answer, wrong_values
from reward_kit.reward_checks.bench import Bench, Seen
from reward_kit.reward_checks.rollouts import QUESTION, request_of, said, user, with_messages

LITTLE = 1e-6
"""Scores nearer than this are one."""
_TEXTS = ("42", "1000", "Paris", "A")
_CALL = {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}
_OTHERS: tuple[Any, ...] = (_CALL, ["red", "green", "blue"])
"""For an annotation that says nothing, where texts cannot be read."""
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
class Ground:
    """One question with its ground truth, and what was learnt of the reward on it.

    Attributes:
        blank: the rollout up to where the answer stands; its end and its facts are those of doing nothing.
        truth: the ground truth; None where the reward takes none.
        gold: a rollout that is right; None where none is known.
        is_given: it is known to be right; else it was found by trying.
        is_truth_given: the truth is the user's; else it was made up for the annotation.
        form: how the reward wants an answer written; None where that is not known, or no text is the answer.
        wrong: wrong values.
        gold_seen: what the right rollout got.
        floor: the most that a wrong answer of the same form got; None where none was scored.
        was_scored: some answer got a score.
        alike: a form in which what is wrong earned as much as the truth, with what it earned; "" where there is none.
    """

    blank: ScoringRequest
    truth: Any = None
    gold: ScoringRequest | None = None
    is_given: bool = False
    is_truth_given: bool = True
    form: Form | None = None
    wrong: Sequence[Any] = ()
    gold_seen: Seen | None = None
    floor: float | None = None
    was_scored: bool = False
    alike: str = ""

    @property
    def gold_score(self) -> float | None:
        """What the right rollout got; None where it has no score, or none is known."""
        return self.gold_seen.score if self.gold_seen is not None else None

    @property
    def tells_apart(self) -> bool:
        """The right rollout earns more than wrong ones."""
        return self.gold_score is not None and self.floor is not None and self.gold_score > self.floor + LITTLE

    def answered(self, text: str | None, before: Sequence[Message] = ()) -> ScoringRequest:
        """The rollout in which this is the answer, after `before`."""
        return with_messages(self.blank, (*self.blank.messages, *before, said(text)))

    def written(self, value: Any) -> str:
        """A value in the form in which the reward wants it."""
        return self.form.write(text_of(value)) if self.form is not None else text_of(value)


@dataclass(frozen=True, slots=True)
class Given:
    """What the user gives besides the reward.

    Attributes:
        truths: ground truths.
        golds: right answers: one for each truth; where the reward takes no truth, any number.
        rollouts: transcripts, whose ground truths are used; a row's `gold_answer` is a right answer to its question.
        ends: pairs of rollouts of one sample: a right one, and one in which nothing was done.
    """

    truths: Sequence[Any] = ()
    golds: Sequence[str] = ()
    rollouts: Sequence[ScoringRequest] = ()
    ends: Sequence[tuple[ScoringRequest, ScoringRequest]] = ()

    def __post_init__(self) -> None:
        if self.golds and self.truths and len(self.golds) != len(self.truths):
            raise ConfigError(
                f"{len(self.truths)} ground truths and {len(self.golds)} right answers: "
                "give one --gold for each --ground-truth"
            )


def grounds_of(given: Given, annotation: str, *, takes_truth: bool, most: int = 4) -> list[Ground]:
    """The questions that a reward is asked, before anything is learnt.

    Args:
        given: what the user gives.
        annotation: of the parameter `ground_truth`, for which truths are made up where none are given.
        takes_truth: the reward has that parameter.
        most: how many of the user's are taken.
    """
    if given.ends:
        pairs = given.ends[:most]
        return [Ground(_before_answer(nothing), right.ground_truth, right, True) for right, nothing in pairs]
    if given.rollouts and not given.truths:
        return [_of_transcript(rollout) for rollout in given.rollouts[:most]]
    if not takes_truth:
        return [_asked(None, gold) for gold in given.golds or (None,)]
    if given.truths:
        answers: Sequence[str | None] = given.golds or [None] * len(given.truths)
        return [_asked(truth, gold) for truth, gold in zip(given.truths, answers, strict=True)]
    made_up = [_asked(truth, None) for truth in truths_for(annotation)]
    return [replace(ground, is_truth_given=False) for ground in made_up]


def truths_for(annotation: str) -> tuple[Any, ...]:
    """Ground truths of the kind that an annotation names; texts where it names none, or texts among others."""
    if "str" in (part.strip() for part in annotation.split("|")):
        return _TEXTS
    found = next((truths for name, truths in _BY_ANNOTATION if name.lower() in annotation.lower()), None)
    return found if found is not None else _TEXTS


async def learned(
    given: Given, annotation: str, bench: Bench, chance: random.Random, *, takes_truth: bool
) -> list[Ground]:
    """The questions, with what the reward gives for answers to them; none where it reads no ground truth made up.

    Args:
        given, annotation, takes_truth: as `grounds_of` takes them.
        bench: where the reward is called.
        chance: for everything random.
    """
    grounds = grounds_of(given, annotation, takes_truth=takes_truth)
    for ground in grounds:
        await learn(ground, bench, chance)
    if all(ground.is_truth_given for ground in grounds):
        return grounds
    if not any(ground.was_scored for ground in grounds) and annotation in ("", "Any", "object", "typing.Any"):
        grounds = [replace(_asked(truth, None), is_truth_given=False) for truth in _OTHERS]
        for ground in grounds:
            await learn(ground, bench, chance)
    return [ground for ground in grounds if ground.was_scored]


async def learn(ground: Ground, bench: Bench, chance: random.Random) -> None:
    """Find out how the reward wants an answer, and what it gives for right and wrong ones."""
    ground.wrong = wrong_values(ground.truth, chance) if ground.truth is not None else ()
    if ground.gold is None and is_tool_call(ground.truth):
        messages = (*ground.blank.messages, tool_answer(ground.truth))
        ground.gold, ground.is_given = with_messages(ground.blank, messages), ground.is_truth_given
    if ground.gold is not None:
        ground.gold_seen = await bench.see(ground.gold)
        ground.form = _form_given(ground)
        ground.floor = await _floor(ground, bench)
        ground.was_scored = ground.gold_score is not None or ground.floor is not None
        return
    if ground.truth is not None:
        await _find_form(ground, bench)


async def _find_form(ground: Ground, bench: Bench) -> None:
    """The first form in which the truth earns the most, and more than what is wrong."""
    best = 0.0
    for form in FORMS:
        tried = replace(ground, form=form)
        tried.gold = tried.answered(tried.written(ground.truth))
        tried.gold_seen = await bench.see(tried.gold)
        ground.was_scored |= tried.gold_score is not None
        if tried.gold_score is None or tried.gold_score <= best + LITTLE:
            continue
        tried.floor = await _floor(tried, bench)
        if tried.floor is None:
            continue  # what is wrong got no score, which is another finding, and says nothing of this one
        if not tried.tells_apart:
            ground.alike = f"{tried.written(ground.truth)[:60]}: {tried.gold_score:.4g}, wrong ones too"
        else:
            best = tried.gold_score
            ground.form, ground.gold, ground.gold_seen, ground.floor = form, tried.gold, tried.gold_seen, tried.floor
        if best >= 1.0 - LITTLE:
            return


async def _floor(ground: Ground, bench: Bench) -> float | None:
    """The most that something wrong earns in the same form."""
    texts = [ground.written(value) for value in ground.wrong] or ["I do not know."]
    seen = [await bench.see(ground.answered(text)) for text in texts]
    scores = [one.score for one in seen if one.score is not None]
    return max(scores, default=None)


def _form_given(ground: Ground) -> Form | None:
    """The form of a right answer that the user gave, where the truth stands in it once."""
    if ground.gold is None or ground.truth is None:
        return None
    text = ground.gold.messages[-1].text if ground.gold.messages else ""
    if len(places := list(places_of(ground.truth, text))) != 1:
        return None
    ((begin, end),) = places
    before, after = text[:begin], text[end:]
    if not (before + after).strip():
        return FORMS[0]
    return Form("as the right answer given", lambda value: f"{before}{value}{after}")


def _asked(truth: Any, gold: str | None) -> Ground:
    blank = request_of((user(QUESTION),), truth, environment_return=0.0)
    ground = Ground(blank, truth)
    if gold is not None:
        ground.gold, ground.is_given = replace(ground.answered(gold), environment_return=1.0), True
    return ground


def _of_transcript(rollout: ScoringRequest) -> Ground:
    ground = Ground(_before_answer(rollout), rollout.ground_truth)
    gold = rollout.sample.get("gold_answer")
    if isinstance(gold, str):
        ground.gold, ground.is_given = ground.answered(gold), True
    return ground


def _before_answer(rollout: ScoringRequest) -> ScoringRequest:
    """The rollout up to its last answer."""
    turns = [position for position, message in enumerate(rollout.messages) if message.role == "assistant"]
    return with_messages(rollout, rollout.messages[: turns[-1]] if turns else rollout.messages)

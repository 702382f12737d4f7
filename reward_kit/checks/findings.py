"""Findings of the checks, and the report that counts them, for a terminal and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from reward_kit.display_text import one_line, pluralize, truncate

Level = Literal["error", "warning", "info"]
LEVELS: tuple[Level, ...] = get_args(Level)
FAIL_ON = (*LEVELS, "never")
_EXAMPLE_CHARS = 400
CAUSES = {
    "action-and-message": "the message was rewritten, or belongs to another step",
    "advantage-unscored": "a missing score counted as 0: unscored is None and takes no part",
    "assistant-turns": "each action appends exactly one assistant message, and rewards find it by its turn",
    "call-answered-twice": "an answer was recorded again, by a retry perhaps; endpoints refuse such a conversation",
    "concatenated-prompts": "give the first prompt, the rest as completion, and env_mask",
    "credit-missing": "all steps of a scored episode are credited, those of an unscored one are not",
    "credit-not-finite": "a score was NaN, or a spread of 0 was divided by",
    "credit-off-action": "an observation would be learnt: the credit was spread over the whole completion",
    "credit-varies": "an action has one: it was discounted or normalised per token, or lies beside its action",
    "drifted-prefix": "the history was tokenised again (keep the ids), or its template rewrites it (segment_reason)",
    "duplicate-rollout": "a row was repeated to fill a batch, or two runs share a seed",
    "environment-reward": "rewards moved by one step, or were changed after the episode",
    "episode-advantage-varies": "it is one number for the whole trajectory: the baseline was taken over steps",
    "group-id": "its baseline is another's",
    "inverted-mask": "1 means that the policy sampled the token",
    "logprob-off-action": "0.0 stands there: the prompt was scored too, or an action is missing in the mask",
    "logprob-positive": "a negative log-likelihood, a logit or a probability was recorded",
    "lost-episodes": "lines of episodes.jsonl were lost",
    "mask-on-prompt": "what was not sampled in this step would be learnt",
    "mask-outside": "a mask was made on another axis, or is the other way round",
    "mask-values": "a mask is 1 where the policy sampled and else 0",
    "reward-misplaced": "it was put at the end of an observation, of the padded row, or on every token",
    "reward-not-finite": "it would spread to every sum and baseline: leave it None",
    "shifted-mask": "one of them was made for next-token targets, or lacks a begin-of-sequence token",
    "stale-version": "drop it, or correct for it with importance weights",
    "start-moved": "something acted between the fork and the first action, or the key covers time, ids or noise",
    "terminated-and-truncated": "a critic must know whether the future is worth nothing (terminated) or was cut off",
    "token-id": "padding, or a label of -100, was taken for a token",
    "two-assistant-messages": "two sampled messages are two steps, and a retry that was thrown away is not a step",
    "two-versions": "weights were swapped inside a forward loop, and no policy has these probabilities",
    "unanswered-call": "the answer was dropped, or its tool_call_id changed; endpoints refuse such a conversation",
    "unknown-version": "how far off policy it is is unknown; return policy_version with every action",
}
"""The likely cause of a kind of finding, or its effect, which ends each of its messages."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A single problem.

    Attributes:
        level: "error" breaks the contract, or makes a wrong number; "warning" may be meant; "info" is worth knowing.
        kind: names the fault, such as "drifted-prefix"; stable, for scripts.
        message: where it is, what is wrong and the likely cause.
        rollout_id: of the episode; None if no single one is at fault.
        step: the action, from 0; None if no action is at fault.
        token: the position in the token ids that the message counts in; None if no token is at fault.
        evidence: lines that show it, such as the rollouts of a reward.
    """

    level: Level
    kind: str
    message: str
    rollout_id: str | None = None
    step: int | None = None
    token: int | None = None
    evidence: tuple[str, ...] = ()


class Findings(list[Finding]):
    """The findings about one thing, in the order in which they were made; `subject` opens each message."""

    def __init__(self, subject: str, rollout_id: str | None = None) -> None:
        super().__init__()
        self.subject = subject
        self.rollout_id = rollout_id

    @classmethod
    def about_episode(cls, rollout_id: str) -> Findings:
        """Return an empty collector for the episode of this id."""
        return cls(f"episode {rollout_id}", rollout_id)

    def error(
        self, kind: str, message: str, *, step: int | None = None, token: int | None = None, level: Level = "error"
    ) -> None:
        """Add a finding; its message gets the place before it, and the entry of `CAUSES` after it."""
        place = [self.subject]
        place += [f"step {step}"] if step is not None else []
        place += [f"token {token}"] if token is not None else []
        text = "; ".join(filter(None, (f"{', '.join(place)}: {message}", CAUSES.get(kind))))
        self.append(Finding(level, kind, text, self.rollout_id, step, token))


@dataclass(slots=True)
class Report:
    """Counts of all findings by kind, and the first few of each kind.

    Attributes:
        target: what was checked, as the user named it.
        unit: what is counted in `checked`: "episode", "record".
        checked: how many of them were looked at.
        findings: in the order in which they were added; of each kind at most `examples`.
        counts: of all findings, by level and kind.
        examples: how many findings of one kind are kept; None for all.
    """

    target: str
    unit: str = "episode"
    checked: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[tuple[Level, str]] = field(default_factory=Counter)
    examples: int | None = 3

    def add(self, findings: Iterable[Finding]) -> None:
        """Count findings, and keep the first of each kind."""
        for finding in findings:
            key = (finding.level, finding.kind)
            self.counts[key] += 1
            if self.examples is None or self.counts[key] <= self.examples:
                self.findings.append(finding)

    def has(self, kind: str) -> bool:
        """Return whether there is a finding of this kind."""
        return any(known == kind for _, known in self.counts)

    def count(self, level: Level) -> int:
        """Return how many findings have this level."""
        return sum(count for (known, _), count in self.counts.items() if known == level)

    def exit_code(self, fail_on: str) -> int:
        """Return 1 if there is a finding of this level or a worse one; `fail_on` is one of `FAIL_ON`."""
        failing = LEVELS[: FAIL_ON.index(fail_on) + 1] if fail_on != "never" else ()
        return int(any(self.count(level) for level in failing))

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "target": self.target,
            "checked": {f"{self.unit}s": self.checked},
            "counts": {level: self.count(level) for level in LEVELS[:2]},
            "findings": [
                {"kind": kind, "level": level, "count": count, "examples": [_example(one) for one in examples]}
                for level, kind, count, examples in self._most_frequent()
            ],
        }

    def lines(self) -> Iterator[str]:
        """Yield the report for a terminal: errors first, the most frequent kind first."""
        for level, kind, count, examples in self._most_frequent():
            yield f"{level + ':':9}{kind}: {pluralize(count, 'finding')}"
            yield from (f"           {truncate(one_line(one.message), _EXAMPLE_CHARS)}" for one in examples)
            if count > len(examples):
                yield f"           … and {count - len(examples)} more"
        yield f"{self.target}: {self.verdict()} in {pluralize(self.checked, self.unit)}"

    def verdict(self) -> str:
        """Return the counts of errors and warnings as a text."""
        return ", ".join(pluralize(self.count(level), level) for level in LEVELS[:2])

    def _most_frequent(self) -> Iterator[tuple[Level, str, int, list[Finding]]]:
        for (level, kind), count in sorted(self.counts.items(), key=lambda item: (item[0][0], -item[1], item[0][1])):
            yield level, kind, count, [one for one in self.findings if (one.level, one.kind) == (level, kind)]


def _example(finding: Finding) -> dict[str, Any]:
    places = {name: getattr(finding, name) for name in ("rollout_id", "step", "token")}
    return {"message": finding.message, **{name: value for name, value in places.items() if value is not None}}

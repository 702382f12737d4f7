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
    "action-and-message": "the message was rewritten, or it belongs to another step",
    "advantage-unscored": "a missing score was counted as 0; unscored episodes must have None, and are excluded",
    "assistant-turns": "each action must append exactly one assistant message, which rewards locate by its turn",
    "call-answered-twice": "an answer was recorded twice, perhaps by a retry; endpoints reject such a conversation",
    "concatenated-prompts": "pass the first prompt, the rest as completion, and env_mask",
    "credit-missing": "a scored episode needs credit on all steps, an unscored one on none",
    "credit-not-finite": "a score was NaN, or there was a division by a spread of 0",
    "credit-off-action": "observations would be trained on: the credit was spread over the whole completion",
    "credit-varies": "credit is constant within an action: it was discounted or normalized per token, or is misaligned",
    "drifted-prefix": "the history was tokenized again (keep the ids), or the chat template "
    "rewrites it (record a segment_reason)",
    "duplicate-rollout": "a row was repeated to fill a batch, or two runs share a seed",
    "environment-reward": "rewards are shifted by one step, or were changed after the episode",
    "episode-advantage-varies": "it must be one number per episode, but the baseline was computed over steps",
    "group-id": "its baseline would come from another group",
    "inverted-mask": "a mask must be 1 only on tokens that the policy sampled",
    "logprob-off-action": "it must be 0.0; the prompt was scored too, or an action is missing from the mask",
    "logprob-positive": "a negative log-likelihood, a logit or a probability was recorded",
    "lost-episodes": "lines of episodes.jsonl were lost",
    "mask-on-prompt": "tokens not sampled in this step would be trained on",
    "mask-outside": "a mask was built for another axis, or is inverted",
    "mask-values": "a mask must be 1 where the policy sampled and 0 elsewhere",
    "reward-misplaced": "it was placed at the end of an observation or of a padded row, or on every token",
    "reward-not-finite": "every sum and baseline would become non-finite; use None",
    "shifted-mask": "one of them is aligned with next-token targets, or lacks the begin-of-sequence token",
    "stale-version": "drop the episode, or correct for its age with importance weights",
    "start-moved": "the state changed between fork and first action, or the key contains time, ids or noise",
    "terminated-and-truncated": "a critic needs to know: the value after the end is 0 "
    "(terminated) or bootstrapped (truncated)",
    "token-id": "padding or a label of -100 was used as a token",
    "two-assistant-messages": "each sampled message is a step, but a discarded retry is not",
    "two-versions": "weights were swapped during generation, so no single policy has these probabilities",
    "unanswered-call": "the answer was dropped, or its tool_call_id changed; endpoints reject such a conversation",
    "unknown-version": "its staleness is unknown; return policy_version with every action",
}
"""The likely cause or effect of each kind of finding, appended to its messages."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A single problem.

    Attributes:
        level: "error" for a broken contract or a wrong number; "warning" if it may be intended; else "info".
        kind: the name of the fault, such as "drifted-prefix"; names are stable.
        message: the location, the problem and the likely cause.
        rollout_id: the episode; None if no single episode is at fault.
        step: the index of the action, from 0; None if no action is at fault.
        token: the position in the token ids; None if no token is at fault.
        evidence: lines that demonstrate the fault, such as rollouts with their scores.
    """

    level: Level
    kind: str
    message: str
    rollout_id: str | None = None
    step: int | None = None
    token: int | None = None
    evidence: tuple[str, ...] = ()


class Findings(list[Finding]):
    """Findings about one subject, in order; each message starts with `subject`."""

    def __init__(self, subject: str, rollout_id: str | None = None) -> None:
        super().__init__()
        self.subject = subject
        self.rollout_id = rollout_id

    @classmethod
    def about_episode(cls, rollout_id: str) -> Findings:
        """Return an empty list of findings for an episode id."""
        return cls(f"episode {rollout_id}", rollout_id)

    def error(
        self, kind: str, message: str, *, step: int | None = None, token: int | None = None, level: Level = "error"
    ) -> None:
        """Add a finding, whose message is preceded by its location and followed by its entry of `CAUSES`."""
        place = [self.subject]
        place += [f"step {step}"] if step is not None else []
        place += [f"token {token}"] if token is not None else []
        text = "; ".join(filter(None, (f"{', '.join(place)}: {message}", CAUSES.get(kind))))
        self.append(Finding(level, kind, text, self.rollout_id, step, token))


@dataclass(slots=True)
class Report:
    """Counts of all findings by kind, and the first few of each kind.

    Attributes:
        target: the checked object, as the user named it.
        unit: the unit of `checked`, such as "episode" or "record".
        checked: the number of checked units.
        findings: in order of addition, at most `examples` of each kind.
        counts: the number of findings by level and kind.
        examples: the maximum number of kept findings of one kind; None keeps all.
    """

    target: str
    unit: str = "episode"
    checked: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[tuple[Level, str]] = field(default_factory=Counter)
    examples: int | None = 3

    def add(self, findings: Iterable[Finding]) -> None:
        """Count findings and keep the first few of each kind."""
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
        """Return 1 if there is a finding of at least this level; `fail_on` is one of `FAIL_ON`."""
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
        """Yield the lines of the report for a terminal: errors first, and the most frequent kind first."""
        for level, kind, count, examples in self._most_frequent():
            yield f"{level + ':':9}{kind}: {pluralize(count, 'finding')}"
            yield from (f"           {truncate(one_line(one.message), _EXAMPLE_CHARS)}" for one in examples)
            if count > len(examples):
                yield f"           … and {count - len(examples)} more"
        yield f"{self.target}: {self.verdict()} in {pluralize(self.checked, self.unit)}"

    def verdict(self) -> str:
        """Return the counts of errors and warnings as text."""
        return ", ".join(pluralize(self.count(level), level) for level in LEVELS[:2])

    def _most_frequent(self) -> Iterator[tuple[Level, str, int, list[Finding]]]:
        for (level, kind), count in sorted(self.counts.items(), key=lambda item: (item[0][0], -item[1], item[0][1])):
            yield level, kind, count, [one for one in self.findings if (one.level, one.kind) == (level, kind)]


def _example(finding: Finding) -> dict[str, Any]:
    places = {name: getattr(finding, name) for name in ("rollout_id", "step", "token")}
    return {"message": finding.message, **{name: value for name, value in places.items() if value is not None}}

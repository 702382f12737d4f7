"""The findings of checks, and a report that can be printed in a terminal or written as JSON."""

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
    "action-and-message": "the message was rewritten, or it belongs to a different step",
    "advantage-unscored": "a missing score was counted as 0; use None for the advantage of unscored episodes",
    "assistant-turns": "each action must append exactly one assistant message, because rewards locate the "
    "message by its turn",
    "call-answered-twice": "the answer was recorded twice, perhaps by a retry; endpoints reject such conversations",
    "concatenated-prompts": "pass the first prompt as prompt_ids and everything after it as completion_ids, and "
    "pass env_mask",
    "credit-missing": "credit must be assigned to all steps of a scored episode and to no step of an unscored episode",
    "credit-not-finite": "a score is NaN, or a value was divided by a standard deviation of 0",
    "credit-off-action": "the credit was spread over the whole completion, so observations would be trained on",
    "credit-varies": "credit must be constant within an action, but it was discounted or normalized per token, or is "
    "misaligned",
    "drifted-prefix": "the history was tokenized again (keep the sampled ids instead), or the chat template "
    "rewrote it (record a segment_reason)",
    "duplicate-rollout": "a row was repeated to fill a batch, or two runs share a seed",
    "environment-reward": "the rewards are shifted by one step, or they were changed after the episode",
    "episode-advantage-varies": "A_E must be constant within an episode, but the baseline was computed over steps",
    "group-id": "the baseline would come from a different group",
    "inverted-mask": "a mask must be 1 only on tokens that the policy sampled",
    "logprob-off-action": "the value must be 0.0, but the prompt was scored too, or an action is missing from the mask",
    "logprob-positive": "a negative log-likelihood, a logit or a probability was recorded",
    "lost-episodes": "lines of episodes.jsonl were lost",
    "mask-on-prompt": "tokens that were not sampled in this step would be trained on",
    "mask-outside": "one of the masks belongs to a different axis or is inverted",
    "mask-values": "a mask must be 1 on sampled tokens and 0 elsewhere",
    "reward-misplaced": "the reward was placed at the end of an observation, at the end of a padded row, or on "
    "every token",
    "reward-not-finite": "all sums and baselines would become non-finite; use None for a missing reward",
    "shifted-mask": "either the mask or the values are aligned with next-token targets or lack the "
    "begin-of-sequence token",
    "stale-version": "drop the episode, or use importance weights to correct for the staleness",
    "start-moved": "the state changed between the fork and the first action, or its key depends on the time, ids or "
    "noise",
    "terminated-and-truncated": "a critic must distinguish the two cases: the value after the end is 0 if the episode "
    "terminated, and is bootstrapped if the episode was truncated",
    "token-id": "padding or a label of -100 was used as a token",
    "two-assistant-messages": "record each sampled message as a step, and do not record discarded retries",
    "two-versions": "weights were swapped during generation, so no single policy has these probabilities",
    "unanswered-call": "the answer was dropped, or its tool_call_id was changed; endpoints reject such conversations",
    "unknown-version": "the staleness is unknown; return policy_version with every action",
}
"""The likely cause or effect of each kind of finding. It is appended to the messages of that kind."""
FIXES = {
    "all-options-earn": "require exactly one marked answer",
    "always-equal-earns": "convert results to JSON in the program's process, and compare them in another process",
    "conftest-earns": "run pytest outside the workspace with -I, --noconftest and -c /dev/null",
    "constant-code-earns": "add hidden tests with different inputs and outputs",
    "counts-earlier-turn": "read only the last message",
    "counts-prompt": "score only the messages that the model wrote",
    "counts-thinking": "remove the reasoning before extracting the answer",
    "counts-tool-text": "read only the content of the last assistant message",
    "early-exit-earns": "require a result that only a completed test run can produce, not an exit status",
    "early-exit-unscored": "run submitted code in a separate process, and score 0 if it ends early",
    "empty-answer-earns": "return 0 if no answer can be extracted",
    "empty-files-earn": "compare the content of the files with expected values",
    "format-alone-earns": "return 0 if the extracted answer is empty",
    "hedge-earns": "require exactly one marked answer",
    "injection-earns": "do not read a verdict from text that contains the answer",
    "length-earns": "do not add points for length",
    "near-miss-earns": "compare whole values",
    "nothing-earns": "test a property that the initial state does not have",
    "opener-earns": "require a marked answer, and return 0 without one",
    "patched-checks-earn": "run submitted code in another process than the checks",
    "patched-clock-earns": "measure time outside the process of the submitted code",
    "printed-verdict-earns": "do not read a verdict from output that submitted code can write",
    "question-earns": "test for content that the task does not state",
    "reads-reference-earns": "keep reference solutions and expected values out of the reach of submitted code",
    "rejects-reformatted": "compare parsed values",
    "repetition-earns": "count a correct answer once",
    "reward-file-earns": "write a reward in every branch, and delete earlier reward files first",
    "shadowed-module-earns": "run Python with -I, and do not put the workspace first on sys.path",
    "source-words-earn": "compare with the ground truth instead of searching for words",
    "tampered-state-earns": "compute expected values from files that the agent cannot change",
    "tests-overwritten": "run only tests from the tests folder",
}
"""How to fix the exploits of rewards and verifiers, by kind."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem found by a check.

    Attributes:
        level: "error" for invalid data or incorrect behavior, "warning" for something that may be intentional, and
            "info" otherwise.
        kind: the name of the fault, such as "drifted-prefix". Names do not change between releases.
        message: the location, the problem and the likely cause.
        rollout_id: the id of the episode, or None if the problem does not concern a single episode.
        step: the index of the action, counted from 0, or None if the problem does not concern a single action.
        token: the position in the token ids, or None if the problem does not concern a single token.
        evidence: lines that demonstrate the fault, such as rollouts with their scores.
        reproduction: the shortest known answer, conversation or script that demonstrates an exploit, or "".
    """

    level: Level
    kind: str
    message: str
    rollout_id: str | None = None
    step: int | None = None
    token: int | None = None
    evidence: tuple[str, ...] = ()
    reproduction: str = ""

    @property
    def fix(self) -> str:
        """A sentence on how to fix an exploit, or ""."""
        return FIXES.get(self.kind, "")


class Findings(list[Finding]):
    """The findings about one subject. Their messages start with `subject`."""

    def __init__(self, subject: str, rollout_id: str | None = None) -> None:
        super().__init__()
        self.subject = subject
        self.rollout_id = rollout_id

    @classmethod
    def about_episode(cls, rollout_id: str) -> Findings:
        """Create an empty list for the findings about an episode."""
        return cls(f"episode {rollout_id}", rollout_id)

    def error(
        self, kind: str, message: str, *, step: int | None = None, token: int | None = None, level: Level = "error"
    ) -> None:
        """Add a finding. Its message starts with the location and ends with the entry in `CAUSES`."""
        location = [self.subject]
        location += [f"step {step}"] if step is not None else []
        location += [f"token {token}"] if token is not None else []
        text = "; ".join(filter(None, (f"{', '.join(location)}: {message}", CAUSES.get(kind))))
        self.append(Finding(level, kind, text, self.rollout_id, step, token))


@dataclass(slots=True)
class Report:
    """The number of findings of each kind, and the first few findings as examples.

    Attributes:
        target: the checked object, as named by the user.
        unit: the unit that `checked` counts, such as "episode" or "record".
        checked: the number of checked units.
        findings: the findings kept as examples, in the order in which they were added.
        counts: the number of findings per level and kind.
        examples: the maximum number of findings to keep per kind. None keeps all findings.
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
        """Return True if there is a finding of this kind."""
        return any(known == kind for _, known in self.counts)

    def count(self, level: Level) -> int:
        """Return the number of findings with this level."""
        return sum(count for (known, _), count in self.counts.items() if known == level)

    def exit_code(self, fail_on: str) -> int:
        """Return 1 if there is a finding at or above the level `fail_on`, otherwise 0.

        `fail_on` is one of `FAIL_ON`.
        """
        failing = LEVELS[: FAIL_ON.index(fail_on) + 1] if fail_on != "never" else ()
        return int(any(self.count(level) for level in failing))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-serializable data."""
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
        """Yield the lines of the report for a terminal, sorted by level and then by frequency."""
        for level, kind, count, examples in self._most_frequent():
            yield f"{level + ':':9}{kind}: {pluralize(count, 'finding')}"
            yield from (f"           {truncate(one_line(one.message), _EXAMPLE_CHARS)}" for one in examples)
            if count > len(examples):
                yield f"           … and {count - len(examples)} more"
        yield f"{self.target}: {self.verdict()} in {pluralize(self.checked, self.unit)}"

    def verdict(self) -> str:
        """Return the error and warning counts as a string."""
        return ", ".join(pluralize(self.count(level), level) for level in LEVELS[:2])

    def _most_frequent(self) -> Iterator[tuple[Level, str, int, list[Finding]]]:
        for (level, kind), count in sorted(self.counts.items(), key=lambda item: (item[0][0], -item[1], item[0][1])):
            yield level, kind, count, [one for one in self.findings if (one.level, one.kind) == (level, kind)]


def _example(finding: Finding) -> dict[str, Any]:
    places = {name: getattr(finding, name) for name in ("rollout_id", "step", "token")}
    return {"message": finding.message, **{name: value for name, value in places.items() if value is not None}}

"""What a check of a reward found: findings by severity, what could not be checked, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from reward_kit.display_text import counted

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a probe found.

    Attributes:
        code: names the mistake, such as `counts-prompt`; stable, for scripts.
        severity: "error" makes a wrong number, "warning" may, "info" is a fact worth knowing.
        message: what was seen, and what to do about it.
        evidence: the rollouts that show it, one line each.
    """

    code: str
    severity: Severity
    message: str
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A question that could not be asked, and what is missing."""

    check: str
    why: str


@dataclass(slots=True)
class Report:
    """What is known of one reward after its check.

    Attributes:
        reward: as the user named it.
        level: where it ran.
        seed: of everything random.
        findings: in the order of the probes.
        unchecked: what was not possible to check.
        facts: what was measured, by name.
    """

    reward: str
    level: str
    seed: int
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, code: str, severity: Severity, message: str, evidence: Sequence[str] = ()) -> None:
        """Add a finding."""
        self.findings.append(Finding(code, severity, message, tuple(evidence)))

    def cannot(self, check: str, why: str) -> None:
        """Say that a question could not be asked; once for each."""
        if all(known.check != check for known in self.unchecked):
            self.unchecked.append(Unchecked(check, why))

    def has(self, code: str) -> bool:
        """Whether there is a finding of this code."""
        return any(finding.code == code for finding in self.findings)

    def count(self, severity: Severity) -> int:
        """How many findings have this severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def fails(self, at: Severity) -> bool:
        """Whether a finding is at or above this severity."""
        return any(SEVERITIES.index(finding.severity) <= SEVERITIES.index(at) for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "reward": self.reward,
            "level": self.level,
            "seed": self.seed,
            "counts": {severity: self.count(severity) for severity in SEVERITIES},
            "findings": [
                {"code": f.code, "severity": f.severity, "message": f.message, "evidence": list(f.evidence)}
                for f in self._sorted()
            ],
            "unchecked": [{"check": one.check, "why": one.why} for one in self.unchecked],
            "facts": self.facts,
        }

    def lines(self) -> Iterator[str]:
        """The report for a terminal, worst first."""
        for finding in self._sorted():
            yield f"{finding.severity + ':':9}{finding.code}: {finding.message}"
            yield from (f"           {shown(line)}" for line in finding.evidence)
        for name, fact in self.facts.items():
            text = fact if isinstance(fact, str) else _printable(json.dumps(fact, ensure_ascii=False))
            yield f"{'fact:':9}{name}: {text}"
        for one in self.unchecked:
            yield f"{'not checked:':13}{one.check}: {one.why}"
        counts = ", ".join(counted(self.count(severity), severity) for severity in SEVERITIES[:2])
        left = f", {counted(len(self.unchecked), 'question')} could not be asked" if self.unchecked else ""
        yield f"{self.reward}: {counts}{left} (run {self.level}, seed {self.seed})"

    def _sorted(self) -> list[Finding]:
        return sorted(self.findings, key=lambda finding: SEVERITIES.index(finding.severity))


def shown(text: str, width: int = _WIDTH) -> str:
    """A text on one line, cut in its middle where it is long, without what a terminal would act on."""
    line = _printable(text[:4000])
    if len(line) <= width:
        return line
    half = (width - 3) // 2
    return f"{line[:half]}…{line[-half:]}"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)

"""A hostile case: code, the expectation in its first line, and the comparison with its outcome."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reward_kit.sandbox import Outcome

TESTS: tuple[tuple[Any, Any], ...] = ((1, 2), (2, 4), (0.5, 1.0), (-3, -6))
"""What submissions are asked, and what is right: twice the number, in its own type."""
REQUEST = {"messages": [{"role": "user", "content": "How much is 2 + 2?"}], "ground_truth": "4"}
WALL_S, CPU_S, MEMORY_MB, DISK_MB, OUTPUT_KB, RESULT_KB = 2.0, 1.0, 400, 8, 64, 256
GRACE_S = 2.5

WORDS = frozenset(
    {
        *("ok", "error", "crashed", "timeout", "memory", "denied", "invalid-result", "result-too-large"),
        *("output-capped", "score-not-forged"),
    }
)
_WORDS_OF_KINDS = {
    **dict.fromkeys(("wall", "cpu"), "timeout"),
    **dict.fromkeys(("signal", "forbidden_call", "zygote"), "crashed"),
    **dict.fromkeys(("denied", "disk", "open_files", "processes"), "denied"),
    "memory": "memory",
    "result_size": "result-too-large",
}
_KEYS = ("expect", "kind", "observe", "score", "maxscore", "repeat")


def word_of(outcome: Outcome) -> str:
    """Return the word for an outcome in case files."""
    if outcome.failure is None:
        return "output-capped" if outcome.is_output_cut else "ok"
    is_invalid = outcome.failure.failure_class == "invalid_result"
    return _WORDS_OF_KINDS.get(outcome.kind, "invalid-result" if is_invalid else "error")


@dataclass(frozen=True)
class Case:
    """A case file.

    Attributes:
        name: its file name without the ending.
        kind: "reward", which defines `evaluate`, or "code", which defines `solve`.
        expect: the words any of which is right.
        score: what a reward must score; None for anything.
        max_score: what share of the tests a submission may pass.
        repeat: what must be the same in two calls; "" for nothing.
        source: its text, with its placeholders.
    """

    name: str
    kind: str
    expect: frozenset[str]
    score: float | None
    max_score: float
    repeat: str
    source: str

    def filled(self, values: Mapping[str, str]) -> str:
        """Return the text with each `@NAME@` replaced."""
        return re.sub("@([A-Z]+)@", lambda match: values.get(match[1], match[0]), self.source)


@dataclass
class Seen:
    """The outcome of a case.

    Attributes:
        word: the outcome's word.
        value: what a reward returned; None where it failed.
        passed: the share of the tests a submission passed.
        text: everything that a user would be shown.
        wall_s: seconds.
        again: what a reward returned the second time, where it is called twice.
    """

    word: str
    value: Any = None
    passed: float = 0.0
    text: str = ""
    wall_s: float = 0.0
    again: Any = None
    problems: list[str] = field(default_factory=list)


def read_case(path: Path) -> Case:
    """Return the case of a file; raise for an invalid first line, so that no case is skipped."""
    source = path.read_text(encoding="utf-8", errors="surrogateescape")
    head = source.partition("\n")[0].removeprefix("#")
    # A bar separates words too, so a part begins where a bar is followed by a known key.
    parts = re.split(rf"(?:^|\|)\s*(?={'|'.join(f'{key}:' for key in _KEYS)})", head)
    keys = {key.strip(): text.strip() for key, _, text in (part.partition(":") for part in parts if part.strip())}
    expect = frozenset(keys["expect"].split("|"))
    if not expect <= WORDS or keys["kind"] not in ("reward", "code"):
        raise ValueError(f"{path}: its first line says {head!r}")
    score = float(keys["score"]) if "score" in keys else None
    max_score = float(keys.get("maxscore", "0"))
    return Case(path.stem, keys["kind"], expect, score, max_score, keys.get("repeat", ""), source)


def read_cases(folder: Path, names: Sequence[str] = ()) -> list[Case]:
    """Return the cases of a folder in order, or only the named ones."""
    return [read_case(path) for path in sorted(folder.glob("*.py")) if not names or path.stem in names]


def is_result(value: Any) -> bool:
    """Return whether a reward may return this: a dict with a finite score."""
    score = value.get("score") if isinstance(value, dict) else None
    return type(score) in (int, float) and math.isfinite(score)


def share_passed(values: Sequence[Any]) -> float:
    """Return the share of passed tests; `1`, `1.0` and `True` are different answers."""
    right = [type(got) is type(wanted) and got == wanted for got, (_, wanted) in zip(values, TESTS, strict=False)]
    return sum(right) / len(TESTS)


def problems_of(case: Case, seen: Seen, secrets: Sequence[str]) -> list[str]:
    """Return the differences from the case's expectation; empty if it passed."""
    found = list(seen.problems)
    word = seen.word
    if case.kind == "code":
        if seen.passed > case.max_score and "ok" not in case.expect:
            found.append(f"forged: it passed {seen.passed:.0%} of the tests")
    elif word in ("ok", "output-capped"):
        if not is_result(seen.value):
            word = "invalid-result"
        else:
            found += _problems_of_result(case, seen)
            if "denied" in case.expect and seen.value.get("denied"):
                word = "denied"
    if word not in case.expect and not (case.kind == "code" and "score-not-forged" in case.expect):
        found.append(f"outcome: {word}, not {' or '.join(sorted(case.expect))}")
    if any(secret in seen.text for secret in secrets):
        found.append("leak: a secret stands in the output")
    if seen.wall_s > WALL_S * (2 if case.repeat else 1) + GRACE_S:
        found.append(f"slow: {seen.wall_s:.1f} s")
    return found


def _problems_of_result(case: Case, seen: Seen) -> list[str]:
    found = [f"breach: {entry}" for entry in seen.value.get("breach", ())]
    if case.score is not None and seen.value["score"] != case.score:
        found.append(f"score: {seen.value['score']}, not {case.score}")
    if case.repeat:
        first, second = (_detail(value, case.repeat) for value in (seen.value, seen.again))
        if first != second:
            found.append(f"state: {case.repeat} was {json.dumps(first)[:80]}, then {json.dumps(second)[:80]}")
    return found


def _detail(value: Any, key: str) -> Any:
    if not isinstance(value, dict):
        return f"no result: {value}"
    detail = value.get("detail", value)
    return detail.get(key) if isinstance(detail, dict) else detail

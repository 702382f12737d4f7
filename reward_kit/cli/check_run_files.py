"""What a run says of itself in `run.json` and `summary.json`, held against its lines; for `reward-kit check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.errors import RewardKitError, StoreError
from reward_kit.runs.credit import FILE as CREDIT
from reward_kit.runs.credit import scores_digest, settings_of
from reward_kit.runs.files import read_json
from reward_kit.runs.run_folder import FILE, RunHeader
from reward_kit.tokens.checking.findings import EpisodeFinding, Found

SUMMARY = "summary.json"
_SAME = 1e-9


class CombinationRule(NamedTuple):
    """A = episode_weight · A_E + step_weight · A_S, as the options of an estimator say."""

    episode_weight: float
    step_weight: float

    def check(self, found: Found, rows: Sequence[Mapping[str, Any]]) -> None:
        """Find the first step whose A is not what its A_E and A_S come to."""
        for row in rows:
            parts = [row.get(name) for name in ("A_E", "A_S", "A")]
            if None in parts:
                continue
            episode, step, told = map(float, parts)  # type: ignore[arg-type]
            expected = self.episode_weight * episode + self.step_weight * step
            if abs(expected - told) > _SAME * max(1.0, abs(expected), abs(told)):
                found.error(
                    "credit-combination",
                    f"A is {told:.6g}, and {self.episode_weight:g} A_E + {self.step_weight:g} A_S is {expected:.6g}; "
                    f"a line was changed by hand, or {SUMMARY} has the options of other credit",
                    step=row["step"],
                )
                return


def combination_rule(run: Path) -> CombinationRule | None:
    """How the credit of a run combines its parts; None where it has none, or nobody can tell."""
    settings = settings_of(run)
    if settings is None:
        return None
    options = settings.options()
    if settings.estimator != "gigpo":
        return CombinationRule(1.0, 1.0)
    is_additive = options.get("combination") == "additive"
    weight = options.get("step_weight" if is_additive else "omega")
    if not isinstance(weight, int | float):
        return None
    return CombinationRule(1.0, weight) if is_additive else CombinationRule(weight, 1.0 - weight)


def check_header(run: Path, rollouts: int | None) -> list[EpisodeFinding]:
    """Check `run.json`, where there is one.

    Args:
        run: its folder.
        rollouts: how many episodes it has, one of several attempts counted once; None where some cannot be read.
    """
    found = Found(FILE)
    if not (run / FILE).is_file():
        return []
    try:
        header = RunHeader.read(run)
    except StoreError as error:
        found.error("unreadable", f"{error}; the file was edited, or written by another version")
        return found.findings
    if header.status == "complete" and rollouts is not None and rollouts < header.total:
        found.error(
            "lost-episodes",
            f"it says that the run is complete with {header.total} episodes, and there are {rollouts}; lines of "
            "episodes.jsonl were lost",
        )
    return found.findings


def check_summary(run: Path) -> list[EpisodeFinding]:
    """Check that the credit of a run, where it has some, is that of the scores which it has now."""
    found = Found(SUMMARY)
    if not (run / SUMMARY).is_file():
        return []
    try:
        section = read_json(run / SUMMARY).get("credit")
    except StoreError as error:
        found.error("unreadable", f"{error}; the file was edited")
        return found.findings
    has_lines = (run / CREDIT).is_file()
    if section is None:
        if has_lines:
            found.warn(
                "credit-scores",
                f"it says nothing of credit, and there is a {CREDIT}; of which scores that is cannot be told: assign "
                f"it again with `reward-kit credit {run}`",
            )
    elif not has_lines:
        found.error("credit-steps", f"it tells of credit, and there is no {CREDIT}: it was lost")
    else:
        _check_scores(found, run, section)
    return found.findings


def _check_scores(found: Found, run: Path, section: Any) -> None:
    settings = settings_of(run)
    if settings is None:
        found.error("unreadable", "the section `credit` cannot be read; the file was edited")
        return
    try:
        digest = scores_digest(run, settings)
    except RewardKitError as error:
        found.error("credit-scores", f"the scores that were credited cannot be read: {error}")
        return
    if digest != section.get("scores_sha256"):
        found.error(
            "credit-scores",
            f"the credit is of other scores than the run has now; assign it again with `reward-kit credit {run}`",
        )

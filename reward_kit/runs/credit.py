"""Compute the credit of each step of a run from its stored episodes and scores, and write `credit.jsonl`.

All data comes from the run's files, where secrets are already redacted. The file is always replaced atomically. Its
lines are ordered by group and rollout.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import operator
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
from pydantic_core import to_jsonable_python

from reward_kit.agent.models import StopReason
from reward_kit.credit.diagnostics import credit_diagnostics, merged_states_warning
from reward_kit.credit.estimators import ESTIMATORS
from reward_kit.credit.state_hashes import describe_state_hash
from reward_kit.episodes.json_codec import TAG
from reward_kit.episodes.record import LatestAttempts, episode_from_record, get_attempt
from reward_kit.errors import ConfigError, EpisodeError, Failure, StoreError, boundary
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.scoring import Scored
from reward_kit.rl_processing import AlignedEpisode, CreditAssigner, CreditBatch
from reward_kit.runs.files import CREDIT_FILE, EPISODES_FILE, SCORES_FILE, SUMMARY_FILE, read_json, write_atomically
from reward_kit.runs.run_folder import RunFolder, placed_episodes, read_credit, read_scores
from reward_kit.runs.tasks import credit_code, credit_code_arguments, make_assigner
from reward_kit.task_parts import CreditModel
from reward_kit.validation import describe_validation_error

SCHEMA_VERSION = 1
_RECORDED: Mapping[str | None, str] = {
    None: "state_key",
    "state_key": "state_key",
    "state_and_results": "state_and_results",
}
"""The state hashes that read only keys of the record, each with the key that every step needs."""


@dataclass(frozen=True, slots=True)
class RunCredit:
    """The result of assigning credit to the steps of a run."""

    section: Mapping[str, Any]
    offsets: Mapping[str, int]

    @property
    def warnings(self) -> list[str]:
        """The problems with the credit. Each warning names the cause and a fix."""
        return list(self.section["warnings"])


def assign_credit(path: Path, credit: CreditModel) -> RunCredit:
    """Assign credit to the steps of the run at `path`, and write or replace its `credit.jsonl`."""
    assigner = make_assigner(credit)
    stored = _stored(path, assigner)
    if all(episode.aligned.score is None for episode in stored):
        raise ConfigError(f"none of the {len(stored)} episodes in {path} is scored; score them before assigning credit")
    batch = assigner.advantages(CreditBatch.from_episodes(episode.aligned for episode in stored))
    lines = ({"schema_version": SCHEMA_VERSION, **row} for row in batch.rows())
    texts = (json.dumps(line, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n" for line in lines)
    write_atomically(path / CREDIT_FILE, texts)
    section = _section(assigner, batch, stored)
    return RunCredit(section, {episode.aligned.rollout_id: episode.offset for episode in stored})


def write_section(path: Path, credit: RunCredit) -> None:
    """Write the `credit` section of the run's `summary.json`; the other sections are not changed."""
    summary = read_json(path / SUMMARY_FILE) if (path / SUMMARY_FILE).exists() else {"schema_version": 1}
    RunFolder(path).write_summary({"policies": [], **summary, "credit": credit.section})


def credit_settings(path: Path) -> CreditModel | None:
    """Return the settings of the last credit assignment of a run, or None if they are missing or unreadable.

    The settings are as untrusted as the run. Call `reject_stored_code` before using them.
    """
    try:
        section = read_json(path / SUMMARY_FILE).get("credit")
        if section is None:
            return None
        own = {key: section[key] for key in ("estimator", "step_rewards")}
        return CreditModel.model_validate({**section["options"], **own})
    except (StoreError, KeyError, TypeError, pydantic.ValidationError):  # Missing or damaged: the file will be replaced
        return None


def reject_stored_code(path: Path, credit: CreditModel) -> None:
    """Raise a ConfigError if stored settings name a function, because the function would be executed."""
    if code := credit_code(credit):
        raise ConfigError(
            f"the credit settings of {path} refer to {code[0]!r}; a function named in a run's files is not executed. "
            f"To use it, run: reward-kit credit {shlex.quote(str(path))} {credit_code_arguments(credit)}"
        )


def scores_digest(path: Path, credit: CreditModel) -> str:
    """Return the `scores_sha256` of the run's current scores."""
    plain = {key: value for key, value in credit.model_dump().items() if key != "state_hash"}
    if credit_code(CreditModel.model_validate(plain)):  # Stored settings may refer to code, which is not executed
        plain = {"step_rewards": credit.step_rewards}
    return _digest(_stored(path, make_assigner(CreditModel.model_validate(plain)), keeps_steps=False))


def headline(section: Mapping[str, Any]) -> str:
    """Summarize the credit of a run on one line.

    The line contains the estimator, the number of steps, and the share of steps in common states.
    """
    weights = {key: section["options"].get(key) for key in ("omega", "step_weight", "gamma")}
    shown = ", ".join(f"{key} {value:g}" for key, value in weights.items() if isinstance(value, int | float))
    share = section["diagnostics"].get("peer_share")
    peers = f", {share:.1%} of the scored ones share their state with another step" if share is not None else ""
    steps = f"{section['steps']:,} steps of {section['episodes']:,} episodes"
    name = section["estimator"].rpartition("/")[2]  # A user's file is located by an absolute path
    return f"Credit by {name}{f' ({shown})' if shown else ''}: {steps}{peers}"


def extreme_steps(path: Path, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return one line for each of up to `count` steps with the highest advantages above 0.

    Lines for up to `count` steps with the lowest advantages below 0 follow.
    """
    key = operator.itemgetter("A")
    best = heapq.nlargest(count, (row for row in read_credit(path) if (row["A"] or 0.0) > 0.0), key=key)
    worst = heapq.nsmallest(count, (row for row in read_credit(path) if (row["A"] or 0.0) < 0.0), key=key)
    return best, worst


# Reading


class _StoredEpisode(NamedTuple):
    """The latest attempt of one episode."""

    aligned: AlignedEpisode
    attempt: int
    rollout_index: int
    offset: int


def _stored(path: Path, assigner: CreditAssigner, *, keeps_steps: bool = True) -> list[_StoredEpisode]:
    """Return the episodes of a run with their base rewards and scores, group by group.

    Episodes that were cut off by the budget of the run are omitted.
    """
    scores = {(score["rollout_id"], get_attempt(score)): score for score in read_scores(path)}
    state_hash = assigner.options.get("state_hash")
    name = state_hash.get("name") if isinstance(state_hash, Mapping) else state_hash
    # A user's estimator may read any part of the record.
    is_built_in = assigner.estimator in ESTIMATORS
    key = _RECORDED.get(name) if is_built_in and (name is None or isinstance(name, str)) else None
    latest = LatestAttempts[_StoredEpisode | None]()
    for number, (offset, record) in enumerate(placed_episodes(path), 1):
        rollout_id, attempt = record["rollout_id"], get_attempt(record)
        if latest.is_outdated(rollout_id, attempt):
            continue
        scored, episode = _scored(path, rollout_id, scores.get((rollout_id, attempt))), None
        where = f"{path / EPISODES_FILE}:{number}"
        try:
            with boundary(StoreError, f"{where}: it cannot be read as an episode"):
                if record["stop_reason"] != StopReason.RUN_LIMIT:
                    aligned = assigner.align_one(episode_from_record(_lean(record, key) if key else record), scored)
                    aligned = aligned if keeps_steps else aligned._replace(steps=[])
                    episode = _StoredEpisode(aligned, attempt, record["rollout_index"] or 0, offset)
        except EpisodeError as error:
            raise StoreError(f"{where}: {error}") from None
        latest.put(rollout_id, attempt, episode)
    stored = [episode for episode in latest.values() if episode is not None]
    return sorted(
        stored, key=lambda episode: (episode.aligned.group_id, episode.rollout_index, episode.aligned.rollout_id)
    )


def _scored(path: Path, rollout_id: str, record: Mapping[str, Any] | None) -> Scored:
    """Parse a line of `scores.jsonl`. If the line is `None`, the episode has not been scored yet."""
    if record is None:
        return Scored(rollout_id)
    result, failure = record.get("result"), record.get("failure")
    where = f"{path / SCORES_FILE}: the score of {rollout_id}"
    try:
        with boundary(StoreError, f"{where} cannot be read"):
            return Scored(
                rollout_id,
                EvaluateResult.model_validate(result) if result is not None else None,
                Failure.from_json(failure) if failure is not None else None,
            )
    except StoreError as error:
        if isinstance(error.__cause__, pydantic.ValidationError):
            problems = "; ".join(describe_validation_error(error.__cause__))
            raise StoreError(f"{where}: result: {problems}") from None
        raise


def _lean(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the record without the parts that no estimator reads, so that conversations are not kept in memory.

    A step without the recorded `key` is identified by its observation or its conversation.
    """
    if any(step.get(key) is None for step in record["steps"]):
        return record
    steps = [
        {
            **{key: value for key, value in step.items() if key != "observation"},
            "action": {},
            "info": _plain(step.get("info") or {}),
            "outputs": {key: value for key, value in (step.get("outputs") or {}).items() if key != "raw_policy_output"},
        }
        for step in record["steps"]
    ]
    final = {"final": {"info": _plain(record["final"].get("info") or {})}} if "final" in record else {}
    return {**record, **final, "messages": [], "steps": steps}


def _plain(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers, flags and names of an info dict; data from tools and users is omitted."""
    return {key: value for key, value in info.items() if not isinstance(value, dict | list) or TAG in value}


# Summary


def _section(assigner: CreditAssigner, batch: CreditBatch, stored: Sequence[_StoredEpisode]) -> dict[str, Any]:
    assert batch.credit is not None  # set by the assigner above
    diagnostics = credit_diagnostics(batch.credit, [len(steps) for steps in batch.steps], batch.scores, batch.group_ids)
    members = Counter(batch.group_ids)
    scored = Counter(group for group, score in zip(batch.group_ids, batch.scores, strict=True) if score is not None)
    merged = merged_states_warning(batch.steps, batch.credit.anchors_S)
    infos = (step.step_info for steps in batch.steps for step in steps)
    return {
        "schema_version": SCHEMA_VERSION,
        "estimator": assigner.estimator,
        "step_rewards": assigner.step_rewards,
        "options": to_jsonable_python(dict(assigner.options), fallback=repr),  # A user's defaults may be any objects
        "state_hash": describe_state_hash(batch.state_hash, infos) if diagnostics.uses_states else None,
        "scores_sha256": _digest(stored),
        "episodes": len(stored),
        "unscored": sum(score is None for score in batch.scores),
        "groups": len(members),
        "groups_without_peers": sum(scored[group] < 2 for group in members),
        "steps": sum(map(len, batch.steps)),
        "diagnostics": {name.removeprefix("credit/"): figure for name, figure in diagnostics.summary().items()},
        "anchor_sizes": {str(size): count for size, count in diagnostics.anchor_sizes.items()},
        "warnings": [*diagnostics.warnings(), *filter(None, [merged])],
    }


def _digest(stored: Iterable[_StoredEpisode]) -> str:
    """Return the digest of the scores, which is used to detect credit that is out of date."""
    digest = hashlib.sha256()
    for episode in stored:
        facts = [episode.aligned.rollout_id, episode.attempt, episode.aligned.score]
        digest.update(json.dumps(facts).encode("ascii") + b"\n")
    return digest.hexdigest()

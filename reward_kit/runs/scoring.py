"""Score existing episodes: transcripts in a file, or the episodes of an earlier run.

In a transcript, each assistant message is a step, and the stop reason is `recorded`. The episodes of a run are copied
byte for byte into a new directory together with their final states. The earlier run is never modified.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pydantic

from reward_kit.agent.actions import episode_from_messages
from reward_kit.agent.models import StopReason
from reward_kit.agent.samples import make_group_id, make_rollout_id
from reward_kit.display_text import pluralize
from reward_kit.episodes.record import EpisodeFacts, LatestAttempts, get_attempt, get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.private_files import make_private_folder
from reward_kit.reward_agent.scoring import Reward, check_parameters, check_truth
from reward_kit.runs.datasets import read_rows
from reward_kit.runs.files import (
    EPISODES_FILE,
    LOG_COPIES,
    RUN_FILE,
    STATES,
    copied_log,
    episodes_files,
    open_part,
    state_file,
    wrap_os_errors,
    write_atomically,
)
from reward_kit.runs.plan import RunPlan
from reward_kit.runs.redaction import HIDDEN, Redaction, load_redaction
from reward_kit.runs.results import ResultIndex, index_results, read_results
from reward_kit.runs.run_folder import RunFolder, RunHeader, load_episode, new_run_path
from reward_kit.runs.task_file import apply_overrides, format_override, override_source
from reward_kit.runs.tasks import credit_code, credit_code_arguments, load_task_reward
from reward_kit.validation import describe_validation_error

_NOT_SAMPLE = ("messages", "ground_truth")


def read_transcripts(path: Path) -> list[SingleAgentEpisode]:
    """Read episodes from a dataset of transcripts, a run's `episodes.jsonl`, or a stored training update.

    A row of a dataset has `messages`, and may have `id`, `ground_truth` and `policy`. Rows with the same `id` are
    rollouts of one sample. The whole row is passed to the reward function as `sample`. From a run, only the latest
    attempts are read, and episodes that were cut off by a run limit are skipped.
    """
    rollouts: Counter[str] = Counter()
    lines: dict[tuple[str, int], str] = {}
    latest = LatestAttempts[SingleAgentEpisode | None]()
    for index, (where, row) in enumerate(read_rows(path)):
        episode: SingleAgentEpisode | None = None  # None if a run limit cut it off
        if "rollout_id" in row and "steps" in row:
            with boundary(StoreError, f"{where}: it cannot be read as an episode"):
                rollout_id, attempt = row["rollout_id"], get_attempt(row)
                if row["stop_reason"] != StopReason.RUN_LIMIT:
                    episode = load_episode(path.parent, row)
        else:
            if "messages" not in row:
                raise ConfigError(f"{where}: a transcript must have a list 'messages'; this row has {', '.join(row)}")
            sample_id = str(row.get("id", f"sample-{index}"))
            group_id, rollout_index = make_group_id(0, sample_id), rollouts[sample_id]
            rollouts[sample_id] += 1
            rollout_id, attempt = make_rollout_id(group_id, rollout_index), 0
            sample = {key: value for key, value in row.items() if key not in _NOT_SAMPLE}
            episode = recorded_episode(
                rollout_id,
                parse_messages(row["messages"], f"{where}: messages"),
                sample_id,
                str(row.get("policy") or row.get("model") or "transcript"),
                sample,
                row.get("ground_truth"),
                group_id,
                rollout_index,
            )
        if (known := lines.setdefault((rollout_id, attempt), where)) != where:
            raise ConfigError(f"{where}: rollout {rollout_id!r} is already used at {known}")
        latest.put(rollout_id, attempt, episode)
    return [episode for episode in latest.values() if episode is not None]


def recorded_episode(
    rollout_id: str,
    messages: list[Message],
    sample_id: str,
    policy: str,
    sample: dict[str, Any],
    truth: Any,
    group_id: str | None = None,
    rollout_index: int = 0,
) -> SingleAgentEpisode:
    """Create an episode from a conversation. Each assistant message is a step."""
    episode = episode_from_messages(rollout_id, messages)
    facts = EpisodeFacts(
        sample_id=sample_id,
        group_id=group_id or sample_id,
        rollout_index=rollout_index,
        attempt=0,
        policy=policy,
        stop_reason=StopReason.RECORDED.value,
        failure=None,
        sample=sample,
        ground_truth=truth,
    )
    episode.custom_data.update(facts)
    return episode


def parse_messages(given: Any, where: str) -> list[Message]:
    """Parse a conversation, which is a list or, in a CSV cell, JSON text."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{where}: expected a list of messages, got {given!r:.80}")
    try:
        return [Message.model_validate(message) for message in given]
    except pydantic.ValidationError as error:
        raise ConfigError(f"{where}: {'; '.join(describe_validation_error(error, Message))}") from None


_OF_REWARD = ("sandbox", "reward_options", "redact")


class ScoreOrigin(NamedTuple):
    """The task for which the episodes were collected, in the form of task file keys, and the directory of its files."""

    task: Mapping[str, Any]
    folder: Path


def run_origin(header: RunHeader) -> ScoreOrigin | None:
    """Return the task of a run, or None if the run scored transcripts."""
    task_path = header.task_path or (header.rescored_from or {}).get("task_path")
    return ScoreOrigin(header.task, Path(task_path).parent) if task_path is not None else None


def data_origin(data: Path) -> ScoreOrigin:
    """Return the task of the run from which the transcripts come, or a placeholder for other transcripts."""
    is_of_run = data.name == EPISODES_FILE and (data.parent / RUN_FILE).is_file()
    known = run_origin(RunHeader.read(data.parent)) if is_of_run else None
    return known or ScoreOrigin({"name": data.stem}, Path.cwd())


class ScoringSetup(NamedTuple):
    """A loaded reward, the redaction for the files of the run, and notes for the user."""

    definition: TaskDefinitionModel
    reward: Reward
    redaction: Redaction
    notes: Sequence[str]


def load_scoring_setup(
    origin: ScoreOrigin,
    reward: str,
    changes: Mapping[str, Any],
    pass_threshold: float | None,
    folder: Path | None = None,
) -> ScoringSetup:
    """Load a reward and the redaction for the files of the run."""
    if (hook := origin.task.get("redact")) is not None and "redact" not in changes:
        raise ConfigError(
            f"this run was redacted by {hook!r}; a function named in run.json is not executed. Pass "
            f"{format_override('redact', shlex.quote(str(hook)))} to redact the new scores with this function, or "
            f"{format_override('redact', 'null')} to write the scores unredacted"
        )
    for key in changes:
        if key != "limits.reward_time_s" and key.partition(".")[0] not in _OF_REWARD:
            raise ConfigError(
                f"{override_source()} {key}: only limits.reward_time_s, sandbox, "
                "reward_options and redact can be set here"
            )
    # The sandbox settings and options of a run apply only to its own reward.
    known = {name: value for name, value in origin.task.items() if name not in (*_OF_REWARD, "rewards")}
    own = {"reward_function_path": reward, **({"pass_threshold": pass_threshold} if pass_threshold is not None else {})}
    try:
        definition = TaskDefinitionModel.model_validate({**apply_overrides(known, changes), **own})
    except pydantic.ValidationError as error:
        problems = describe_validation_error(error, TaskDefinitionModel)
        raise ConfigError("\n".join(f"{override_source()} {line}" for line in problems)) from None
    notes: list[str] = []
    if definition.credit is not None and credit_code(definition.credit):
        arguments = credit_code_arguments(definition.credit)
        definition = definition.model_copy(update={"credit": None})
        notes.append(
            f"no credit is assigned, because a function named in run.json is not executed; to assign credit "
            f"after the run, use `reward-kit credit RUN {arguments}`"
        )
    folder = (folder or Path.cwd()).resolve()
    loaded = load_task_reward(definition, folder)
    assert loaded is not None  # The definition names the reward
    return ScoringSetup(definition, loaded.reward, load_redaction(definition, folder), (*notes, *loaded.notes))


class ScoringRun(NamedTuple):
    """A run that only scores existing episodes: its plan, its new directory, and the episodes."""

    plan: RunPlan
    store: RunFolder
    episodes: Sequence[SingleAgentEpisode]
    title: str


def scoring_run(data: Path, ready: ScoringSetup, reward: str, log_dir: Path) -> ScoringRun:
    """Create a run that scores transcripts."""
    episodes = read_transcripts(data)
    if not episodes:
        raise ConfigError(f"{data} has no rows")
    check_reward(ready.reward, map(get_facts, episodes))
    plan = RunPlan(ready.definition, reward=ready.reward, given=len(episodes), redaction=ready.redaction)
    header = RunHeader(
        task_name=ready.definition.name,
        data=str(data.resolve()),
        reward=reward,
        task={"pass_threshold": ready.definition.pass_threshold},
        total=plan.total,
    )
    store = RunFolder.create(new_run_path(log_dir, ready.definition.name), header, ready.redaction)
    return ScoringRun(plan, store, episodes, f"{data.name}  ({pluralize(len(episodes), 'transcript')})")


def check_reward(reward: Reward, facts: Iterable[Mapping[str, Any]]) -> None:
    """Raise the same ConfigError as `run` if the reward would fail on every row."""
    check_parameters(reward)
    truths, fields = [], {"messages"}
    for fact in facts:
        truths.append(fact.get("ground_truth"))
        fields |= (fact.get("sample") or {}).keys()
    check_truth(reward, truths, sorted(fields), "row")


@dataclass(frozen=True, slots=True)
class SourceRun:
    """The run whose episodes are scored again."""

    path: Path
    header: RunHeader
    index: ResultIndex

    @property
    def redact(self) -> str | None:
        """The redaction hook of the run, or None."""
        return self.header.task.get("redact")


def open_source_run(run: Path) -> SourceRun:
    """Open a run so that its episodes can be scored again."""
    header = RunHeader.read_folder(run)
    if header.training is not None:
        kept = list(episodes_files(run).values())
        kept_none = "it kept no episodes (logs.episodes_every)"
        instead = f"score its kept episodes: reward-kit score {kept[-1]}" if kept else kept_none
        raise ConfigError(f"{run} is a training run, which has no episodes.jsonl; {instead}")
    index = index_results(run)
    if not index.episodes:
        raise ConfigError(f"{run} has no finished episodes to score")
    return SourceRun(run, header, index)


def copy_results(source: SourceRun, target: Path, redaction: Redaction) -> int:
    """Copy the episodes of a run, their final states, and imported logs into the directory of a new run.

    Lines are copied unchanged, except that the secrets of this process are hidden.

    Returns:
        The number of episodes that contain a hidden secret.
    """
    hidden = 0

    def lines() -> Iterator[bytes]:
        nonlocal hidden
        for result in read_results(source.path, source.index):
            if state := result.episode.get("final_state"):
                file = state_file(source.path, result.episode["rollout_id"], state)
                link_or_copy(file, target / STATES / file.name)
            line = redaction.redact_line(result.line.rstrip(b"\n")) + b"\n"
            hidden += HIDDEN.encode() in line
            yield line

    write_atomically(target / EPISODES_FILE, lines())
    for log in (source.header.imported or {}).get("files") or ():
        file = copied_log(source.path, log.get("copy"))
        link_or_copy(file, target / LOG_COPIES / file.name)
    return hidden


def link_or_copy(file: Path, copy: Path) -> None:
    """Create a hard link to a file of a run in another run, or a copy if that is not possible."""
    with wrap_os_errors("write", copy):
        make_private_folder(copy.parent, exist_ok=True)
        if not copy.exists():
            try:
                os.link(file, copy)  # States with equal content are stored once
            except OSError:  # Not every file system supports hard links
                with file.open("rb") as source, open_part(copy, copy, is_private=True) as part:
                    shutil.copyfileobj(source, part)


def checked_facts(source: SourceRun) -> Iterator[Mapping[str, Any]]:
    """Yield the ground truth and the sample of each episode, and check that the final state of the episode exists."""
    for result in read_results(source.path, source.index):
        if state := result.episode.get("final_state"):
            state_file(source.path, result.episode["rollout_id"], state)
        yield {key: result.episode.get(key) for key in ("ground_truth", "sample")}

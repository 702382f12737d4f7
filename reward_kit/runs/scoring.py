"""Score episodes that are there already: transcripts from a file, or the episodes of an earlier run.

In a transcript each assistant message is a step, and the end is `recorded`. The episodes of a run are copied into a
new folder as they were stored, byte for byte, with their final states; the earlier run is read and never written.
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
from reward_kit.runs.files import STATES, episodes_files, open_part, state_file, wrap_os_errors, write_atomically
from reward_kit.runs.plan import RunPlan
from reward_kit.runs.redaction import HIDDEN, Redaction, load_redaction
from reward_kit.runs.results import ResultIndex, index_results, read_results
from reward_kit.runs.run_folder import FILE, RunFolder, RunHeader, load_episode, new_run_path
from reward_kit.runs.task_file import format_override, overlaid, override_source
from reward_kit.runs.tasks import load_tasks_reward
from reward_kit.validation import describe_validation_error

_NOT_SAMPLE = ("messages", "ground_truth")


def read_transcripts(path: Path) -> list[SingleAgentEpisode]:
    """The episodes of a dataset with a `messages` field, or of a run's `episodes.jsonl` or a kept update.

    A row may have `id` (rows of one id are rollouts of one sample), `ground_truth` and `policy`; everything in it is
    handed to the reward function as `sample`. Of a run's episodes only the latest attempt counts, and none that the
    run's limit cut off.
    """
    rollouts: Counter[str] = Counter()
    lines: dict[tuple[str, int], str] = {}
    latest = LatestAttempts[SingleAgentEpisode | None]()
    for index, (where, row) in enumerate(read_rows(path)):
        episode: SingleAgentEpisode | None = None  # of a run, one that the run's limit cut off does not count
        if "rollout_id" in row and "steps" in row:
            with boundary(StoreError, f"{where}: it cannot be read as an episode"):
                rollout_id, attempt = row["rollout_id"], get_attempt(row)
                if row["stop_reason"] != StopReason.RUN_LIMIT:
                    episode = load_episode(path.parent, row)
        else:
            if "messages" not in row:
                raise ConfigError(
                    f"{where}: a transcript needs a list called 'messages'; this row has {', '.join(row)}"
                )
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
            raise ConfigError(f"{where}: rollout {rollout_id!r} is used already at {known}")
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
    """Return an episode of which only the conversation is known: each assistant message is a step."""
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
    """Parse a conversation; a CSV cell holds it as JSON text."""
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
    """The task that episodes were collected for, as keys of a task file, and the folder of the files that it names."""

    task: Mapping[str, Any]
    folder: Path


def run_origin(header: RunHeader) -> ScoreOrigin | None:
    """The task of a run; None where it scored transcripts of which nothing is known."""
    task_path = header.task_path or (header.rescored_from or {}).get("task_path")
    return ScoreOrigin(header.task, Path(task_path).parent) if task_path is not None else None


def data_origin(data: Path) -> ScoreOrigin:
    """The run's own task where transcripts are a run's, else next to nothing."""
    is_of_run = data.name == "episodes.jsonl" and (data.parent / FILE).is_file()
    known = run_origin(RunHeader.read(data.parent)) if is_of_run else None
    return known or ScoreOrigin({"name": data.stem}, Path.cwd())


class ScoringSetup(NamedTuple):
    """A reward that is ready to score, the redaction of the files, and notes for the user."""

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
    """Load a reward, and what redacts the run's files."""
    if (hook := origin.task.get("redact")) is not None and "redact" not in changes:
        raise ConfigError(
            f"the texts of this run were redacted by {hook!r}, which its run.json names and which is therefore not "
            f"executed; give {format_override('redact', shlex.quote(str(hook)))} to redact the new scores by it, or "
            f"{format_override('redact', 'null')} to write them as they are"
        )
    for key in changes:
        if key != "limits.reward_time_s" and key.partition(".")[0] not in _OF_REWARD:
            raise ConfigError(
                f"{override_source()} {key}: only limits.reward_time_s, sandbox, reward_options and redact apply here"
            )
    # A run chose its sandbox and options for its own reward only.
    known = {name: value for name, value in origin.task.items() if name not in _OF_REWARD}
    own = {"reward_function_path": reward, **({"pass_threshold": pass_threshold} if pass_threshold is not None else {})}
    try:
        definition = TaskDefinitionModel.model_validate({**overlaid(known, changes), **own})
    except pydantic.ValidationError as error:
        problems = describe_validation_error(error, TaskDefinitionModel)
        raise ConfigError("\n".join(f"{override_source()} {line}" for line in problems)) from None
    folder = (folder or Path.cwd()).resolve()
    loaded = load_tasks_reward(definition, folder)
    assert loaded is not None  # the definition names it
    return ScoringSetup(definition, loaded.reward, load_redaction(definition, folder), loaded.notes)


class ScoringRun(NamedTuple):
    """A run that scores what is there: its plan, its new folder, and the episodes."""

    plan: RunPlan
    store: RunFolder
    episodes: Sequence[SingleAgentEpisode]
    title: str


def scoring_run(data: Path, ready: ScoringSetup, reward: str, log_dir: Path) -> ScoringRun:
    """Make the run that scores transcripts."""
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
    """Reject a reward that would break on every row, or could be right on none, as `run` does."""
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
        """The function that its texts went through before they were stored, where there is one."""
        return self.header.task.get("redact")


def open_source_run(run: Path) -> SourceRun:
    """The run in a folder, checked."""
    header = RunHeader.read_folder(run)
    if header.training is not None:
        kept = list(episodes_files(run).values())
        instead = f"score those it kept: reward-kit score {kept[-1]}" if kept else "it kept none (logs.episodes_every)"
        raise ConfigError(f"{run} is a training run, which has no episodes.jsonl; {instead}")
    index = index_results(run)
    if not index.episodes:
        raise ConfigError(f"{run} has no episode that could be scored")
    return SourceRun(run, header, index)


def copy_results(source: SourceRun, target: Path, redaction: Redaction) -> int:
    """Copy the episodes of a run, with their final states, into the folder of a new one.

    Secrets that are known by now are hidden; apart from that each line is as it was. Returns the number of episodes in
    which one is hidden.
    """
    hidden = 0

    def lines() -> Iterator[bytes]:
        nonlocal hidden
        for result in read_results(source.path, source.index):
            if state := result.episode.get("final_state"):
                file = state_file(source.path, result.episode["rollout_id"], state)
                copy = target / STATES / file.name
                with wrap_os_errors("write", copy):
                    make_private_folder(copy.parent, exist_ok=True)
                    if not copy.exists():
                        try:
                            os.link(file, copy)  # states are never written twice
                        except OSError:  # not on every disk
                            with file.open("rb") as state_of, open_part(copy, copy, is_private=True) as part:
                                shutil.copyfileobj(state_of, part)
            line = redaction.redact_line(result.line.rstrip(b"\n")) + b"\n"
            hidden += HIDDEN.encode() in line
            yield line

    write_atomically(target / "episodes.jsonl", lines())
    return hidden


def checked_facts(source: SourceRun) -> Iterator[Mapping[str, Any]]:
    """Yield the ground truth and sample of each episode, and check that its final state exists."""
    for result in read_results(source.path, source.index):
        if state := result.episode.get("final_state"):
            state_file(source.path, result.episode["rollout_id"], state)
        yield {key: result.episode.get(key) for key in ("ground_truth", "sample")}

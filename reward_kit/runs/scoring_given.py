"""A reward made ready for episodes that are there already: `score`, `rescore`, and the same from Python."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pydantic

from reward_kit.display_text import counted
from reward_kit.episodes.record import facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.models import TaskDefinitionModel
from reward_kit.reward_agent.scoring import Reward, check_parameters, check_truth
from reward_kit.runs.header import FILE, RunHeader
from reward_kit.runs.overrides import as_given, given_by, overlaid
from reward_kit.runs.plan import Plan
from reward_kit.runs.redaction import Redaction, redaction_of
from reward_kit.runs.store import RunStore, new_run_path
from reward_kit.runs.tasks import load_tasks_reward
from reward_kit.runs.transcripts import read_transcripts
from reward_kit.validation import describe_validation_error

_OF_REWARD = ("sandbox", "reward_options", "redact")


class Origin(NamedTuple):
    """What episodes were collected for, as keys of a task file, and where the files lie that it names."""

    task: Mapping[str, Any]
    folder: Path


def origin_of(header: RunHeader) -> Origin | None:
    """The task of a run; None where it scored transcripts of which nothing is known."""
    task_path = header.task_path or (header.rescored_from or {}).get("task_path")
    return Origin(header.task, Path(task_path).parent) if task_path is not None else None


def origin_of_data(data: Path) -> Origin:
    """The run's own task where transcripts are a run's, else next to nothing.

    Raises:
        StoreError: the run's header is damaged.
    """
    is_of_run = data.name == "episodes.jsonl" and (data.parent / FILE).is_file()
    known = origin_of(RunHeader.read(data.parent)) if is_of_run else None
    return known or Origin({"name": data.stem}, Path.cwd())


class Ready(NamedTuple):
    """What scores are given by, what is kept out of the files, and what the user should know of it."""

    definition: TaskDefinitionModel
    reward: Reward
    redaction: Redaction
    notes: Sequence[str]


def ready_to_score(
    origin: Origin,
    reward: str,
    changes: Mapping[str, Any],
    pass_threshold: float | None,
    folder: Path | None = None,
) -> Ready:
    """Load a reward, and what redacts the run's files.

    Args:
        origin: what the episodes were collected for.
        reward: FILE.py:FUNCTION.
        changes: dotted keys of a task file, with their values.
        pass_threshold: a score of this or more passes; None leaves the task's.
        folder: what the files of the reward and of `redact` are relative to; by default the working directory.

    Raises:
        ConfigError: one of them cannot be loaded, or a key is wrong.
    """
    if (hook := origin.task.get("redact")) is not None and "redact" not in changes:
        raise ConfigError(
            f"the texts of this run were redacted by {hook!r}, which its run.json names and which is therefore not "
            f"executed; give {as_given('redact', shlex.quote(str(hook)))} to redact the new scores by it, or "
            f"{as_given('redact', 'null')} to write them as they are"
        )
    definition = definition_for_scores(origin.task, reward, changes, pass_threshold)
    folder = (folder or Path.cwd()).resolve()
    loaded = load_tasks_reward(definition, folder)
    assert loaded is not None  # the definition names it
    return Ready(definition, loaded.reward, redaction_of(definition, folder), loaded.notes)


class ScoringRun(NamedTuple):
    """A run that scores what is there: its plan, its new folder, and the episodes."""

    plan: Plan
    store: RunStore
    episodes: Sequence[SingleAgentEpisode]
    title: str


def scoring_run(data: Path, ready: Ready, reward: str, log_dir: Path) -> ScoringRun:
    """Make the run that scores transcripts.

    Args:
        data: the file that has them.
        ready: what they are scored by.
        reward: what it is called.
        log_dir: where the run's folder is made.

    Raises:
        ConfigError: there are no transcripts, or the reward asks for what they do not have.
        StoreError: the folder cannot be written.
    """
    episodes = read_transcripts(data)
    if not episodes:
        raise ConfigError(f"{data} has no rows")
    check_reward(ready.reward, map(facts_of, episodes))
    plan = Plan(ready.definition, reward=ready.reward, given=len(episodes))
    header = RunHeader(
        task_name=ready.definition.name,
        data=str(data.resolve()),
        reward=reward,
        task={"pass_threshold": ready.definition.pass_threshold},
        total=plan.total,
    )
    store = RunStore.create(new_run_path(log_dir, ready.definition.name), header, ready.redaction)
    return ScoringRun(plan, store, episodes, f"{data.name}  ({counted(len(episodes), 'transcript')})")


def definition_for_scores(
    known: Mapping[str, Any], reward: str, changes: Mapping[str, Any], pass_threshold: float | None
) -> TaskDefinitionModel:
    """What scores are given by. Walls and options of a run were chosen for its own reward, and not for this one.

    Args:
        known: keys of the task that the episodes were collected for.
        reward: FILE.py:FUNCTION.
        changes: dotted keys of a task file, with their values.
        pass_threshold: a score of this or more passes; None leaves the task's.

    Raises:
        ConfigError: a key has nothing to do with scores, or a value is wrong.
    """
    known = {name: value for name, value in known.items() if name not in _OF_REWARD}
    for key in changes:
        if key != "limits.reward_time_s" and key.partition(".")[0] not in _OF_REWARD:
            raise ConfigError(
                f"{given_by()} {key}: only limits.reward_time_s, sandbox, reward_options and redact apply here"
            )
    named: dict[str, Any] = {"reward_function_path": reward}
    if pass_threshold is not None:
        named["pass_threshold"] = pass_threshold
    try:
        return TaskDefinitionModel.model_validate({**overlaid(known, changes), **named})
    except pydantic.ValidationError as error:
        problems = describe_validation_error(error, TaskDefinitionModel)
        raise ConfigError("\n".join(f"{given_by()} {line}" for line in problems)) from None


def check_reward(reward: Reward, facts: Iterable[Mapping[str, Any]]) -> None:
    """As `run` does of its samples: a reward that would break on every row, or could be right on none, is refused.

    Args:
        reward: the reward.
        facts: of each episode, at least its `ground_truth` and its `sample`.

    Raises:
        ConfigError: it asks for what nobody gives.
    """
    check_parameters(reward)
    truths, fields = [], {"messages"}
    for fact in facts:
        truths.append(fact.get("ground_truth"))
        fields |= (fact.get("sample") or {}).keys()
    check_truth(reward, truths, sorted(fields), "row")

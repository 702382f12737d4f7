"""`reward-kit score`: a reward function on transcripts one already has."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import pydantic

from reward_kit.cli.outcome import Ending, carry_out
from reward_kit.cli.reward_flags import where_it_runs
from reward_kit.episodes.record import facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.models import TaskDefinitionModel
from reward_kit.reward_agent.scoring import Reward, check_parameters, check_truth
from reward_kit.runs.header import FILE, RunHeader
from reward_kit.runs.overrides import overlaid, parse_override
from reward_kit.runs.plan import Plan
from reward_kit.runs.redaction import Redaction, redaction_of
from reward_kit.runs.request import environment_of
from reward_kit.runs.store import RunStore, new_run_path
from reward_kit.runs.tasks import load_tasks_reward
from reward_kit.runs.transcripts import read_transcripts
from reward_kit.validation import describe_validation_error


@click.command(name="score")
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--reward", required=True, metavar="FILE.py:FUNCTION", help="The reward function.")
@click.option(
    "-O",
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    envvar="REWARD_KIT_SCORE_OPTION",
    help="An option of the reward.",
)
@where_it_runs("the run's")
@click.option(
    "-T",
    "--set",
    "overrides",
    multiple=True,
    envvar="REWARD_KIT_SCORE_SET",
    metavar="KEY=VALUE",
    help="Set sandbox.KEY or limits.reward_time_s, as in a task file.",
)
@click.option("--pass-threshold", type=float, help="A score of this or more passes; default 1, or the run's.")
@click.option("--log-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--fail-under", type=float, metavar="X", help="Exit 1 where a mean score is below X.")
@click.option("--display", type=click.Choice(["rich", "plain", "none"]), help="Progress; default by terminal.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    envvar="REWARD_KIT_SCORE_JSON",
    help="Print the summary as JSON on standard output.",
)
def command(
    data: Path,
    reward: str,
    sandbox: str | None,
    sandbox_back_end: str | None,
    install_requirements: bool,
    options: tuple[str, ...],
    overrides: tuple[str, ...],
    pass_threshold: float | None,
    log_dir: Path,
    fail_under: float | None,
    display: str | None,
    as_json: bool,
) -> None:
    """Score DATA with a reward function: a JSONL, CSV or YAML file whose rows have `messages`.

    A row may have `id`, `ground_truth` and `policy`. The `episodes.jsonl` of a run is such a file too.

    \b
    Example: reward-kit score transcripts.jsonl --reward my_reward.py:exact
    """
    changes = dict(parse_override(item) for item in overrides) | ({"sandbox.level": sandbox} if sandbox else {})
    changes |= {f"reward_options.{key}": value for key, value in (parse_override(item, "-O") for item in options)}
    changes |= {"sandbox.back_end": sandbox_back_end} if sandbox_back_end else {}
    changes |= {"sandbox.install_requirements": True} if install_requirements else {}
    origin = _origin_of(data)
    definition = _definition(origin.task, reward, pass_threshold, changes)
    with contextlib.redirect_stdout(sys.stderr):  # a user's module may print when it is loaded
        loaded = load_tasks_reward(definition, Path.cwd())
        redaction = _redaction(definition, origin.folder)
    assert loaded is not None  # the definition names it
    for note in loaded.notes:
        click.echo(note, err=True)
    episodes = read_transcripts(data)
    if not episodes:
        raise ConfigError(f"{data} has no rows")
    _check_reward(loaded.reward, episodes)
    plan = Plan(definition, reward=loaded.reward, given=len(episodes))
    header = RunHeader(
        task_name=definition.name,
        data=str(data.resolve()),
        reward=reward,
        task={"pass_threshold": definition.pass_threshold},
        total=plan.total,
        **environment_of(loaded.reward),
    )
    store = RunStore.create(new_run_path(log_dir, definition.name), header, redaction)
    ending = Ending(
        title=f"{data.name}  ({len(episodes)} transcripts)",
        pass_threshold=definition.pass_threshold,
        expected=plan.total,
        fail_under=fail_under,
        as_json=as_json,
    )
    sys.exit(carry_out(plan, store, ending, display=display, given=episodes))


def _check_reward(reward: Reward, episodes: Sequence[SingleAgentEpisode]) -> None:
    """As `run` does of its samples: a reward that would break on every row, or could be right on none, is refused."""
    check_parameters(reward)
    facts = [facts_of(episode) for episode in episodes]
    fields = ("messages", *(key for fact in facts for key in fact.get("sample") or {}))
    check_truth(reward, (fact.get("ground_truth") for fact in facts), fields, "row")


_OF_REWARD = ("sandbox", "reward_options")


class _Origin(NamedTuple):
    """What transcripts were collected for, as keys of a task file, and where the files lie that it names."""

    task: Mapping[str, Any]
    folder: Path


def _origin_of(data: Path) -> _Origin:
    """The run's own task where the transcripts are a run's, else next to nothing."""
    if data.name == "episodes.jsonl" and (data.parent / FILE).is_file():
        header = RunHeader.read(data.parent)
        if header.task_path is not None:
            return _Origin(header.task, Path(header.task_path).parent)
    return _Origin({"name": data.stem}, Path.cwd())


def _redaction(definition: TaskDefinitionModel, folder: Path) -> Redaction:
    try:
        return redaction_of(definition, folder)
    except ConfigError as error:
        raise ConfigError(f"the run's redact: {error}; nothing is written unredacted") from error


def _definition(
    known: Mapping[str, Any], reward: str, pass_threshold: float | None, changes: Mapping[str, Any]
) -> TaskDefinitionModel:
    """What scores are given by. Walls and options of a run were chosen for its own reward, and not for this one."""
    known = {name: value for name, value in known.items() if name not in _OF_REWARD}
    for key in changes:
        if key != "limits.reward_time_s" and key.partition(".")[0] not in _OF_REWARD:
            raise ConfigError(f"-T {key}: a score has limits.reward_time_s, sandbox and reward_options, and no other")
    named: dict[str, Any] = {"reward_function_path": reward}
    if pass_threshold is not None:
        named["pass_threshold"] = pass_threshold
    try:
        return TaskDefinitionModel.model_validate({**overlaid(known, changes), **named})
    except pydantic.ValidationError as error:
        problems = describe_validation_error(error, TaskDefinitionModel)
        raise ConfigError("\n".join(f"-T {line}" for line in problems)) from None

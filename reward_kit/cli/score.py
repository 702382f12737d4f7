"""`reward-kit score`: a reward function on transcripts one already has."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pydantic

from reward_kit.cli.outcome import Ending, carry_out
from reward_kit.errors import ConfigError
from reward_kit.models import TaskDefinitionModel, describe_validation_error
from reward_kit.reward_agent.scoring import check_parameters
from reward_kit.runs.plan import Plan
from reward_kit.runs.store import RunStore, new_run_path, read_json
from reward_kit.runs.tasks import Task, load_tasks_reward, overlaid, parse_override
from reward_kit.runs.transcripts import read_transcripts


@click.command(name="score")
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--reward", required=True, metavar="FILE.py:FUNCTION", help="The reward function.")
@click.option(
    "--sandbox",
    type=click.Choice(["in_process", "warm", "isolated"]),
    help="Behind which walls the reward runs; default: the run's, else warm for a file of one's own.",
)
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
    definition = _definition(data, reward, pass_threshold, changes)
    with contextlib.redirect_stdout(sys.stderr):  # a user's module may print when it is loaded
        loaded = load_tasks_reward(definition, Path.cwd())
    assert loaded is not None  # the definition names it
    for note in loaded.notes:
        click.echo(note, err=True)
    episodes = list(read_transcripts(data))
    if not episodes:
        raise ConfigError(f"{data} has no rows")
    check_parameters(loaded.reward)
    plan = Plan(Task(definition, data, (), 0, reward=loaded.reward), (), (), 0)
    header = {
        "task_name": definition.name,
        "data": str(data.resolve()),
        "reward": reward,
        "total": len(episodes),
        "versions": {"reward_kit": version("reward-kit"), "python": platform.python_version()},
    }
    store = RunStore.create(new_run_path(log_dir, definition.name), header)
    ending = Ending(
        title=f"{data.name}  ({len(episodes)} transcripts)",
        pass_threshold=definition.pass_threshold,
        expected=len(episodes),
        fail_under=fail_under,
        as_json=as_json,
    )
    sys.exit(carry_out(plan, store, ending, display=display, given=episodes))


def _definition(
    data: Path, reward: str, pass_threshold: float | None, changes: Mapping[str, Any]
) -> TaskDefinitionModel:
    """What the transcripts were collected for: the run's own task where they are a run's, else next to nothing.

    The walls of a run were chosen for its own reward, and say nothing of the one that is named here.
    """
    known: dict[str, Any] = {"name": data.stem}
    if data.name == "episodes.jsonl" and (data.parent / "run.json").is_file():
        known = read_json(data.parent / "run.json").get("task", known)
    known = {name: value for name, value in known.items() if name != "sandbox"}
    for key in changes:
        if key != "limits.reward_time_s" and key.partition(".")[0] != "sandbox":
            raise ConfigError(f"-T {key}: a score has limits.reward_time_s and the keys of sandbox, and no other")
    named: dict[str, Any] = {"reward_function_path": reward}
    if pass_threshold is not None:
        named["pass_threshold"] = pass_threshold
    try:
        return TaskDefinitionModel.model_validate({**overlaid(known, changes), **named})
    except pydantic.ValidationError as error:
        problems = describe_validation_error(error, TaskDefinitionModel)
        raise ConfigError("\n".join(f"-T {line}" for line in problems)) from None

"""What `score` and `rescore` share: their flags, and a reward made ready for episodes that are there already."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from reward_kit.cli.numbers import Number
from reward_kit.cli.reward_flags import keys_of_walls, where_it_runs
from reward_kit.errors import ConfigError
from reward_kit.models import TaskDefinitionModel
from reward_kit.reward_agent.scoring import Reward
from reward_kit.runs.header import RunHeader
from reward_kit.runs.overrides import parse_override
from reward_kit.runs.redaction import Redaction, redaction_of
from reward_kit.runs.scoring_given import definition_for_scores
from reward_kit.runs.tasks import load_tasks_reward


@dataclass(frozen=True, slots=True)
class Asked:
    """What the flags said.

    Attributes:
        reward: FILE.py:FUNCTION.
        options: of the reward.
        changes: dotted keys of a task file, with their values.
        pass_threshold: a score of this or more passes; None is the run's, or 1.
        log_dir: where the new run's folder is made.
        fail_under: the gate on mean scores.
        display: the kind of progress.
        as_json: the summary goes to standard output as JSON.
    """

    reward: str
    options: Mapping[str, Any]
    changes: Mapping[str, Any]
    pass_threshold: float | None
    log_dir: Path
    fail_under: float | None
    display: str | None
    as_json: bool


def scoring_flags(verb: str) -> Callable[[Any], Any]:
    """The flags by which a reward is named and set; the command gets what they say as `asked`.

    Args:
        verb: of the command, for the names of environment variables.
    """
    named = f"REWARD_KIT_{verb.upper()}"
    flags = (
        click.option("--reward", required=True, metavar="FILE.py:FUNCTION", help="The reward function."),
        click.option(
            "-O",
            "--option",
            "options",
            multiple=True,
            metavar="KEY=VALUE",
            envvar=f"{named}_OPTION",
            help="An option of the reward.",
        ),
        where_it_runs(),
        click.option(
            "-T",
            "--set",
            "overrides",
            multiple=True,
            envvar=f"{named}_SET",
            metavar="KEY=VALUE",
            help="Set sandbox.KEY or limits.reward_time_s, as in a task file.",
        ),
        click.option(
            "--pass-threshold", type=Number(), help="A score of this or more passes; default 1, or the run's."
        ),
        click.option("--log-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True),
        click.option("--fail-under", type=Number(), metavar="X", help="Exit 1 where a mean score is below X."),
        click.option("--display", type=click.Choice(["rich", "plain", "none"]), help="Progress; default by terminal."),
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            envvar=f"{named}_JSON",
            help="Print the summary as JSON on standard output.",
        ),
    )

    def add(command: Callable[..., None]) -> Any:
        def gathered(**given: Any) -> None:
            command(asked=_asked(given), **given)

        flagged: Any = functools.wraps(command)(gathered)
        for flag in reversed(flags):
            flagged = flag(flagged)
        return flagged

    return add


def _asked(given: dict[str, Any]) -> Asked:
    """What the flags said, taken out of what click gives."""
    options = dict(parse_override(item, "-O") for item in given.pop("options"))
    changes = dict(parse_override(item) for item in given.pop("overrides"))
    changes |= {f"reward_options.{key}": value for key, value in options.items()}
    changes |= keys_of_walls(*(given.pop(name) for name in ("sandbox", "sandbox_back_end", "install_requirements")))
    kept = ("reward", "pass_threshold", "log_dir", "fail_under", "display", "as_json")
    return Asked(options=options, changes=changes, **{name: given.pop(name) for name in kept})


class Origin(NamedTuple):
    """What episodes were collected for, as keys of a task file, and where the files lie that it names."""

    task: Mapping[str, Any]
    folder: Path


def origin_of(header: RunHeader) -> Origin | None:
    """The task of a run; None where it scored transcripts of which nothing is known."""
    task_path = header.task_path or (header.rescored_from or {}).get("task_path")
    return Origin(header.task, Path(task_path).parent) if task_path is not None else None


class Ready(NamedTuple):
    """What scores are given by, and what is kept out of the files."""

    definition: TaskDefinitionModel
    reward: Reward
    redaction: Redaction


def made_ready(origin: Origin, asked: Asked) -> Ready:
    """Load the reward, and what redacts the run's files; what is worth knowing of it goes to standard error.

    Raises:
        ConfigError: one of them cannot be loaded, or a flag is wrong.
    """
    definition = definition_for_scores(origin.task, asked.reward, asked.changes, asked.pass_threshold)
    with contextlib.redirect_stdout(sys.stderr):  # a user's module may print when it is loaded
        loaded = load_tasks_reward(definition, Path.cwd())
        redaction = _redaction(definition, origin.folder)
    assert loaded is not None  # the definition names it
    for note in loaded.notes:
        click.echo(note, err=True)
    return Ready(definition, loaded.reward, redaction)


def _redaction(definition: TaskDefinitionModel, folder: Path) -> Redaction:
    try:
        return redaction_of(definition, folder)
    except ConfigError as error:
        raise ConfigError(f"the run's redact: {error}; nothing is written unredacted") from error

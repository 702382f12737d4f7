"""What `score` and `rescore` share: their flags, and a reward made ready for episodes that are there already."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from reward_kit.cli import completing
from reward_kit.cli.echo import echo
from reward_kit.cli.log_dir import log_dir_option
from reward_kit.cli.numbers import Number
from reward_kit.cli.reward_flags import keys_of_walls, where_it_runs
from reward_kit.cli.trust import require_trust_in, trust_option
from reward_kit.runs.overrides import parse_override
from reward_kit.runs.scoring_given import Origin, Ready, ready_to_score

_ALSO_LOOKED_IN = {"rescore": "; without RUN, also where the newest run is looked for"}


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

    def add(command: Callable[..., None]) -> Any:
        def gathered(**given: Any) -> None:
            command(asked=_asked(given), **given)

        flagged: Any = functools.wraps(command)(gathered)
        for flag in reversed(_flags(verb)):
            flagged = flag(flagged)
        return flagged

    return add


def _flags(verb: str) -> tuple[Callable[[Any], Any], ...]:
    named = f"REWARD_KIT_{verb.upper()}"
    return (
        click.option(
            "--reward",
            required=True,
            metavar="FILE.py:FUNCTION",
            shell_complete=completing.rewards,
            help="The reward function.",
        ),
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
            help="Set sandbox.KEY, limits.reward_time_s or redact, as in a task file.",
        ),
        click.option(
            "--pass-threshold", type=Number(), help="A score of this or more passes; default 1, or the run's."
        ),
        log_dir_option(f"Where the new run's folder is made{_ALSO_LOOKED_IN.get(verb, '')}."),
        click.option("--fail-under", type=Number(), metavar="X", help="Exit 1 where a mean score is below X."),
        click.option("--display", type=click.Choice(["rich", "plain", "none"]), help="Progress; default by terminal."),
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            envvar=f"{named}_JSON",
            help="Print the summary as JSON on standard output.",
        ),
        trust_option,
    )


def _asked(given: dict[str, Any]) -> Asked:
    """What the flags said, taken out of what click gives."""
    options = dict(parse_override(item, "-O") for item in given.pop("options"))
    changes = dict(parse_override(item) for item in given.pop("overrides"))
    changes |= {f"reward_options.{key}": value for key, value in options.items()}
    changes |= keys_of_walls(given.pop("sandbox"))
    kept = ("reward", "pass_threshold", "log_dir", "fail_under", "display", "as_json")
    return Asked(options=options, changes=changes, **{name: given.pop(name) for name in kept})


def made_ready(origin: Origin, asked: Asked) -> Ready:
    """What scores are given by; what is worth knowing of it goes to standard error.

    Raises:
        ConfigError: the reward or what redacts cannot be loaded, or a flag is wrong.
    """
    hook = asked.changes.get("redact")
    require_trust_in([asked.reward, *([hook] if isinstance(hook, str) else [])])
    with contextlib.redirect_stdout(sys.stderr):  # a user's module may print when it is loaded
        ready = ready_to_score(origin, asked.reward, asked.changes, asked.pass_threshold)
    for note in ready.notes:
        echo(note, err=True)
    return ready

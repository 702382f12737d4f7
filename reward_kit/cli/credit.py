"""`reward-kit credit`: compute the credit of each step from the scores of a run, with any estimator."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pydantic
from rich import box
from rich.table import Table
from rich.text import Text

from reward_kit.agent.actions import action_text
from reward_kit.cli.echo import echo_json
from reward_kit.cli.options import (
    WholeNumber,
    complete_estimators,
    complete_runs,
    json_option,
    newest_run_option,
    run_or_newest,
    set_option,
)
from reward_kit.cli.outcome import note_console, note_page
from reward_kit.cli.trust import require_trust_in, require_trust_in_file, trust_option
from reward_kit.console import SafeConsole
from reward_kit.display_text import truncate
from reward_kit.errors import ConfigError, StoreError
from reward_kit.report.run_page import write_page
from reward_kit.runs.credit import (
    RunCredit,
    assign_credit,
    extreme_steps,
    headline,
    reject_stored_code,
    write_section,
)
from reward_kit.runs.files import CREDIT_FILE
from reward_kit.runs.run_folder import RunHeader, episode_at, is_open_elsewhere
from reward_kit.runs.task_file import LocatedYaml, parse_override, parse_task
from reward_kit.runs.tasks import credit_code, locate_credit
from reward_kit.task_parts import CreditModel
from reward_kit.validation import describe_validation_error

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_LONGEST_ACTION = 60
_LONGEST_STATE = 36
_DIGEST, _DIGEST_SHOWN = re.compile("[0-9a-f]{32,}"), 8


@click.command(name="credit")
@click.argument("run", required=False, type=click.Path(path_type=Path), shell_complete=complete_runs)
@click.option(
    "--estimator",
    metavar="NAME",
    shell_complete=complete_estimators,
    help="The estimator, or file.py:function; default: the estimator in the task's `credit:` block, otherwise gigpo.",
)
@set_option("Set an option of the estimator, or step_rewards.", ("-O", "--option", "options"))
@newest_run_option()
@trust_option
@click.option(
    "--top", type=WholeNumber(0), default=5, show_default=True, help="Number of best and worst steps to show."
)
@json_option("Print the summary and the steps as JSON on standard output.")
def command(
    run: Path | None, estimator: str | None, options: tuple[str, ...], log_dir: Path, top: int, as_json: bool
) -> None:
    """Compute the credit of each step in RUN, write it to credit.jsonl, and show the best and worst steps.

    An existing credit.jsonl is replaced, and report.html is rewritten with the credit of every step. Without RUN, the
    newest run is used.

    \b
    Examples:
      reward-kit credit
      reward-kit credit runs/my-run
      reward-kit credit runs/my-run --estimator rloo
      reward-kit credit runs/my-run -O omega=0.3 -O 'state_hash={name: last_messages, count: 2}'
    """
    run = run_or_newest(run, log_dir)
    header = RunHeader.read_folder(run)
    if header.training is not None:
        raise ConfigError(
            f"{run} is a training run, which has no episodes.jsonl; the credit of its stored episodes "
            "(logs.episodes_every) is in their lines in episodes/, under training.credit"
        )
    asked = dict(parse_override(item, "-O") for item in options)
    typed = {"estimator": estimator} if estimator else {}
    typed |= {"state_hash": asked["state_hash"]} if "state_hash" in asked else {}
    settings = _trusted(run, header, _settings(header, estimator, asked), credit_code(CreditModel(**typed)))
    if is_open_elsewhere(run):
        raise StoreError(f"{run} is open in another process; wait until it has finished")
    credit = assign_credit(run, settings)
    write_section(run, credit)
    best, worst = (
        [{**row, "action": episode_at(run, credit.offsets[row["rollout_id"]]).get_actions(row["step"])} for row in rows]
        for rows in extreme_steps(run, top)
    )
    if as_json:
        echo_json({"run": str(run), **credit.section, "best": best, "worst": worst})
    else:
        _show(credit, best, worst)
    note = note_console()
    for warning in credit.warnings:
        note.print(f"warning: {warning}", style="yellow")
    note.print(f"Written to {run / CREDIT_FILE}")
    note_page(*write_page(run))


def _settings(header: RunHeader, estimator: str | None, asked: Mapping[str, Any]) -> CreditModel:
    """Return the task's credit settings after applying the overrides from the command line.

    If `--estimator` selects a different estimator, the estimator options of the task are dropped.
    """
    if "estimator" in asked:
        raise ConfigError("-O estimator: write --estimator NAME")
    try:
        of_task = CreditModel.model_validate(header.task.get("credit") or {})
        known = of_task.model_dump()
        if estimator not in (None, of_task.estimator):
            known = {"estimator": estimator, "step_rewards": of_task.step_rewards}
        return CreditModel.model_validate({**known, **asked})
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(f"-O {line}" for line in describe_validation_error(error))) from None


def _trusted(run: Path, header: RunHeader, settings: CreditModel, typed: Sequence[str]) -> CreditModel:
    """Return the settings if the user trusts the functions to which the settings refer.

    `typed` contains the references given on the command line. All other references come from the run's files.
    """
    if typed:
        require_trust_in(typed)
    stored = set(credit_code(settings)).difference(typed)
    settings = locate_credit(settings, Path.cwd())
    if not stored:
        return settings
    path = Path(header.task_path or "")
    if header.from_python is None and path.is_file():
        require_trust_in_file(path, stored=header.overrides)
        credit = parse_task(LocatedYaml(path), header.overrides).credit
        if credit is not None and stored.issubset(credit_code(locate_credit(credit, path.resolve().parent))):
            return settings
    reject_stored_code(run, settings)
    return settings


def _show(credit: RunCredit, best: Sequence[Mapping[str, Any]], worst: Sequence[Mapping[str, Any]]) -> None:
    # A terminal has a fixed width. For a file or a pipe, the width is whatever the table needs.
    console = SafeConsole(width=None if SafeConsole().is_terminal else 160)
    console.print(Text(headline(credit.section), "bold"))
    table = Table(box=None, show_header=False)
    section = credit.section
    unscored, alone = section["unscored"], section["groups_without_peers"]
    episodes = f"{section['episodes']}{f', {unscored} unscored and without credit' if unscored else ''}"
    groups = f"{section['groups']}{f', {alone} with fewer than two scored episodes' if alone else ''}"
    table.add_row(Text("episodes", "dim"), Text(episodes))
    table.add_row(Text("groups", "dim"), Text(groups))
    if section["state_hash"] is not None:
        table.add_row(Text("state hash", "dim"), Text(_short(section["state_hash"], _LONGEST_ACTION)))
    for name, value in section["diagnostics"].items():
        if name not in ("trajectories", "unscored", "steps", "groups"):
            text = f"{value:.1%}" if name.endswith("_share") else f"{value:.3g}"
            table.add_row(Text(name.replace("_", " "), "dim"), Text(text))
    console.print(table)
    for title, rows in (("Best steps", best), ("Worst steps", worst)):
        if rows:
            console.print(_steps_table(title, rows))
    if not best and not worst and credit.section["diagnostics"].get("zero_advantage_share", 1) == 1:
        console.print("No step is better or worse than comparable steps.")


def _steps_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    look: dict[str, Any] = {"box": box.SIMPLE, "pad_edge": False, "collapse_padding": True}
    table = Table(title=Text(title, "bold"), title_justify="left", **look)
    for name in ("A", "A_E", "A_S", "G"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("peers", justify="right")
    for name in ("episode", "step", "state", "action"):
        table.add_column(name, overflow="fold", no_wrap=name == "step")
    for row in rows:
        values = [row[name] for name in ("A", "A_E", "A_S", "return_to_go")]
        figures = ["–" if value is None else f"{value + 0.0:+.3f}" for value in values]  # show -0.0 as 0.0
        peers = "–" if row["peers"] is None else str(row["peers"])
        key, action = str(row["state_key"]), _short(action_text(row["action"]), _LONGEST_ACTION)
        # The start of a digest suffices to distinguish states.
        state = f"{key[:_DIGEST_SHOWN]}…" if _DIGEST.fullmatch(key) else _short(key, _LONGEST_STATE)
        table.add_row(*figures, peers, *map(Text, (row["rollout_id"], str(row["step"]), state, action)))
    return table


def _short(text: str, length: int) -> str:
    """Return untrusted text on one line, without terminal control characters."""
    return truncate(_UNPRINTABLE.sub(" ", text), length)

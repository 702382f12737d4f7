"""`reward-kit rescore`: another reward on the stored episodes of a run, without the model, and what that changes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reward_kit.cli import completing
from reward_kit.cli.echo import echo
from reward_kit.cli.newest import run_or_newest
from reward_kit.cli.outcome import Ending, FurtherPart, run_into
from reward_kit.cli.scoring import Asked, made_ready, scoring_flags
from reward_kit.display_text import printable
from reward_kit.errors import ConfigError, StoreError
from reward_kit.processes import SECRET_NAME
from reward_kit.reward_agent.scoring import Reward
from reward_kit.runs.header import FILE, RunHeader
from reward_kit.runs.inputs import digest_of, scorer_hash
from reward_kit.runs.plan import Plan
from reward_kit.runs.redaction import HIDDEN, without_secrets
from reward_kit.runs.rescoring import (
    Counts,
    PolicyChange,
    ScoreChanges,
    Source,
    changes_of,
    checked_facts,
    copy_results,
    scores_of,
    source_of,
)
from reward_kit.runs.scoring_given import Origin, Ready, check_reward, origin_of
from reward_kit.runs.store import RunStore, is_open_elsewhere, new_run_path
from reward_kit.runs.tables import difference_text, figure, interval_text

_MUST_HOLD = {"run": "episodes of another run", "files": "the run has changed since", "scorer": "another reward"}


@click.command(name="rescore")
@click.argument("run", required=False, type=click.Path(path_type=Path), shell_complete=completing.runs)
@scoring_flags("rescore")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The new run's folder; one that this command began goes on. Default: a new one in --log-dir.",
)
@click.option("--only-failed", is_flag=True, help="With -o: score again what the reward failed on.")
def command(run: Path | None, asked: Asked, output: Path | None, only_failed: bool) -> None:
    """Score the stored episodes of RUN again, without the model, and show what changed. RUN stays as it is.

    The result is a run of its own, with the same episodes. Texts that were redacted are scored as they are stored.
    Without RUN, the newest is taken.

    \b
    Examples:
      reward-kit rescore --reward my_reward.py:stricter
      reward-kit rescore runs/my-run --reward my_reward.py:stricter -o runs/stricter
    """
    run = run_or_newest(run, asked.log_dir, besides=output)
    source = source_of(run)
    ready = made_ready(origin_of(source.header) or Origin({"name": source.header.task_name}, Path.cwd()), asked)
    # The model's costs and limits were those of the run; here nothing but the reward runs.
    definition = ready.definition.model_copy(update={"run_limits": type(ready.definition.run_limits)()})
    ready = ready._replace(definition=definition)
    check_reward(ready.reward, checked_facts(source))
    plan = Plan(definition, reward=ready.reward, given=len(source.places.episodes))
    header = _header(source, asked, ready, plan)
    store = _store(output, header, asked, ready)
    if only_failed and output is None:
        raise ConfigError("--only-failed scores again what an earlier rescore failed on; name its folder with -o")
    _fill(store, source, ready)
    before = scores_of(source)
    ending = Ending(
        title=f"{source.path.name}  scored again by {asked.reward}",
        pass_threshold=definition.pass_threshold,
        expected=plan.total,
        fail_under=asked.fail_under,
        as_json=asked.as_json,
        resume_command=_again(run, asked, store.path),
        credit=definition.credit,
        further=lambda rows: _part(changes_of(before, rows, definition.pass_threshold)),
    )
    sys.exit(run_into(plan, store, ending, display=asked.display, only_failed=only_failed))


def _header(source: Source, asked: Asked, ready: Ready, plan: Plan) -> RunHeader:
    """What `run.json` says of the new run: the task as it was, by this reward, and where its episodes came from."""
    earlier = source.header
    files = {name: source.path / name for name in ("episodes.jsonl", "scores.jsonl")}
    told = {
        "run": str(source.path.resolve()),
        "run_id": earlier.run_id or source.path.name,
        "task_path": earlier.task_path or (earlier.rescored_from or {}).get("task_path"),
        "files": {name: digest_of(file) for name, file in files.items() if file.exists()},
        "scorer": _scorer(ready.reward),
        "options": without_secrets(dict(asked.options)),
    }
    task = ready.definition.model_dump(mode="json", exclude_defaults=True)
    return RunHeader(
        task_name=ready.definition.name,
        data=str((source.path / "episodes.jsonl").resolve()),
        reward=asked.reward,
        rescored_from=told,
        task=without_secrets(task),
        seed=earlier.seed,
        total=plan.total,
    )


def _scorer(reward: Reward) -> dict[str, str]:
    return {"id": reward.id, "hash": scorer_hash(reward)}


def _store(output: Path | None, header: RunHeader, asked: Asked, ready: Ready) -> RunStore:
    """The new run's folder, or the one of an earlier call of the same command, to go on with.

    Raises:
        ConfigError: the folder is of something else; it is said what.
        StoreError: another process has it open.
    """
    path = output or new_run_path(asked.log_dir, header.task_name)
    if not path.exists():
        return RunStore.create(path, header.with_(run_id=path.name), ready.redaction)
    if not (path / FILE).is_file():
        raise ConfigError(f"-o {path}: this is there already, and is no run; name a folder that is not there yet")
    if is_open_elsewhere(path):
        raise StoreError(f"{path} is open in another process; wait for it to end")
    begun = RunHeader.read(path).rescored_from or {}
    for key, told in _MUST_HOLD.items():
        if begun.get(key) != (header.rescored_from or {})[key]:
            raise ConfigError(f"-o {path}: what is there cannot go on ({told}); name a folder that is not there yet")
    store = RunStore(path, ready.redaction)
    store.header = RunHeader.read(path)
    return store


def _fill(store: RunStore, source: Source, ready: Ready) -> None:
    """The episodes, where the folder has none yet, and what is to be known of their texts."""
    if (store.path / "episodes.jsonl").exists():
        return
    copied = copy_results(source, store.path, ready.redaction)
    if source.redact:
        echo(f"the texts went through {source.redact} when they were stored; they are scored as stored", err=True)
    if copied.blotted:
        of = f"{copied.blotted:,} of {copied.episodes:,} episodes"
        echo(f"secrets are blotted out of {of}; they are scored as stored, with {HIDDEN!r} there", err=True)


def _again(run: Path, asked: Asked, path: Path) -> list[str]:
    """The command that goes on, with secrets left for the user to give again."""
    command = ["reward-kit", "rescore", str(run), "--reward", asked.reward]
    for key, value in asked.changes.items():
        option = key.removeprefix("reward_options.")
        flag = "-O" if option != key else "-T"
        command += [flag, f"{option}={'…' if SECRET_NAME.search(option) else _as_typed(value)}"]
    command += ["--pass-threshold", f"{asked.pass_threshold:g}"] if asked.pass_threshold is not None else []
    return [*command, "-o", str(path)]


def _as_typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# What is shown


def _part(changes: ScoreChanges) -> FurtherPart:
    return FurtherPart("changes", changes.to_json(), _shown(changes))


def _shown(changes: ScoreChanges) -> RenderableType:
    """One column for each policy, and below it the episodes that moved most."""
    table = Table(title=Text("What changed", "bold"), box=box.SIMPLE_HEAVY, title_justify="left")
    table.add_column("", style="dim", no_wrap=True)
    for policy in changes.policies:
        table.add_column(Text(printable(policy.policy)), justify="right", overflow="fold")
    for name, cells in _lines(changes.policies):
        table.add_row(name, *cells)
    return Group(table, _moved(changes)) if changes.moved else table


def _lines(policies: Sequence[PolicyChange]) -> list[tuple[str, list[str]]]:
    def counted(name: str) -> list[str]:
        return [f"{getattr(one.episodes, name):,}" for one in policies]

    lines = [
        ("mean score before", [interval_text(one.before) for one in policies]),
        ("mean score now", [interval_text(one.after) for one in policies]),
        ("difference, paired", [difference_text(one.difference) for one in policies]),
        ("episodes scored both times", [f"{one.paired:,}" for one in policies]),
        ("higher / lower / equal", [_ways(one.episodes) for one in policies]),
        ("failed before, pass now", counted("to_passed")),
        ("passed before, fail now", counted("to_failed")),
        ("samples higher / lower / equal", [_samples(one) for one in policies]),
    ]
    for name, told in (("lost", "scored before, not now"), ("gained", "scored now, not before")):
        if any(getattr(one.episodes, name) for one in policies):
            lines.append((told, counted(name)))
    return lines


def _ways(counts: Counts) -> str:
    return f"{counts.up:,} / {counts.down:,} / {counts.same:,}"


def _samples(change: PolicyChange) -> str:
    return f"{change.samples_up:,} / {change.samples_down:,} / {change.samples_same:,}"


def _moved(changes: ScoreChanges) -> RenderableType:
    table = Table(title=Text("Moved most", "bold"), box=box.SIMPLE, title_justify="left")
    table.add_column("episode", overflow="fold")
    for name in ("before", "now"):
        table.add_column(name, justify="right")
    for one in changes.moved:
        table.add_row(Text(printable(one.rollout_id)), figure(one.before), figure(one.after))
    return table

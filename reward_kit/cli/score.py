"""`reward-kit score`: score transcripts with a reward, or score the stored episodes of a run again."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reward_kit.cli.echo import echo
from reward_kit.cli.options import (
    Number,
    SectionedCommand,
    cache_arguments,
    cache_option,
    complete_rewards,
    complete_runs,
    display_option,
    fail_on_error_option,
    fail_under_options,
    json_option,
    log_dir_option,
    run_or_newest,
    sandbox_keys,
    sandbox_options,
    set_option,
    thresholds,
)
from reward_kit.cli.outcome import Ending, run_into
from reward_kit.cli.trust import require_trust_in, trust_option
from reward_kit.display_text import SECRET_NAME, printable
from reward_kit.errors import ConfigError, StoreError
from reward_kit.providers.response_cache import ResponseCache
from reward_kit.providers.session import ProviderSession
from reward_kit.runs.display import difference_text, figure, interval_text
from reward_kit.runs.files import EPISODES_FILE, RUN_FILE, SCORES_FILE
from reward_kit.runs.inputs import hash_path, scorer_hash
from reward_kit.runs.plan import RunPlan
from reward_kit.runs.redaction import HIDDEN, without_secrets
from reward_kit.runs.rescoring import ScoreChanges, compare_scores, earlier_scores
from reward_kit.runs.run_folder import RunFolder, RunHeader, is_open_elsewhere, new_run_path
from reward_kit.runs.scoring import (
    ScoreOrigin,
    ScoringSetup,
    SourceRun,
    check_reward,
    checked_facts,
    copy_results,
    data_origin,
    load_scoring_setup,
    open_source_run,
    run_origin,
    scoring_run,
)
from reward_kit.runs.summary import EpisodeRow, Threshold
from reward_kit.runs.task_file import parse_override

_MUST_HOLD = {
    "run": "episodes of a different run",
    "files": "the run has changed since",
    "scorer": "a different reward",
}
_COLLECTED_BY = ("seed", "rollouts", "limit", "sample_ids", "run_limits", "digests", "policy_settings")
"""The keys of a header with the rules by which the episodes were collected, for the rollout card."""
_SECTIONS = {
    "Reward and sandbox": (
        *("reward", "options", "sandbox"),
        *("overrides", "pass_threshold", "trust", "cache"),
    ),
    "Limits": ("fail_under", "lower_bound", "error_limit"),
    "Rescoring": ("output", "only_failed"),
    "Output": ("log_dir", "display", "as_json", "verbose"),
}


@dataclass(frozen=True, slots=True)
class ScoreArgs:
    """The options of `score`."""

    reward: str
    options: Mapping[str, Any]
    changes: Mapping[str, Any]
    pass_threshold: float | None
    log_dir: Path
    cache: Path | None
    thresholds: tuple[Threshold, ...]
    error_limit: float | None
    display: str | None
    as_json: bool


@click.command(name="score", cls=SectionedCommand, sections=_SECTIONS)
@click.argument(
    "data", required=False, type=click.Path(path_type=Path), metavar="[DATA|RUN]", shell_complete=complete_runs
)
@click.option(
    "--reward",
    required=True,
    metavar="FILE.py:FUNCTION",
    shell_complete=complete_rewards,
    help="The reward function.",
)
@set_option("Set an option of the reward.", ("-O", "--option", "options"))
@sandbox_options()
@set_option("Set sandbox.KEY, limits.reward_time_s or redact, as in a task file.")
@click.option(
    "--pass-threshold", type=Number(), help="Lowest passing score; default: the run's threshold, otherwise 1."
)
@trust_option
@fail_under_options("a mean score")
@fail_on_error_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Directory of the new run, or of an interrupted rescoring to continue; default: a new one in --log-dir.",
)
@cache_option
@click.option("--only-failed", is_flag=True, help="With -o: score only the unscored episodes.")
@log_dir_option("Parent of the new run's directory; without DATA, also the directory to search for the newest run.")
@display_option()
@json_option()
def command(data: Path | None, output: Path | None, only_failed: bool, **options: Any) -> None:
    """Score the transcripts in DATA with a reward function, or score the episodes of RUN again.

    DATA is a JSONL, CSV or YAML file. Its rows have `messages` and, optionally, `id`, `ground_truth` and `policy`.

    RUN is the directory of a run. Its stored episodes are scored again without calling the model, the scores are
    written to a new run, and the changes are shown. RUN is not modified. Redacted text is scored as stored. Without
    RUN, the newest run is used.

    \b
    Examples:
      reward-kit score transcripts.jsonl --reward my_reward.py:exact
      reward-kit score runs/my-run --reward my_reward.py:stricter
      reward-kit score runs/my-run --reward my_reward.py:stricter -o runs/stricter
    """
    reward_options = dict(parse_override(item, "-O") for item in options.pop("options"))
    changes = dict(parse_override(item) for item in options.pop("overrides"))
    changes |= {f"reward_options.{key}": value for key, value in reward_options.items()}
    changes |= sandbox_keys(options.pop("sandbox"))
    gates = thresholds(options.pop("fail_under"), options.pop("lower_bound"))
    args = ScoreArgs(options=reward_options, changes=changes, thresholds=gates, **options)
    if data is None or data.is_dir():
        sys.exit(_score_run(run_or_newest(data, args.log_dir, except_for=output), args, output, only_failed))
    if output is not None or only_failed:
        raise click.UsageError(
            f"{'-o' if output is not None else '--only-failed'} requires RUN, the directory of a run"
        )
    ready = _load_reward(data_origin(data), args)
    scored = scoring_run(data, ready, args.reward, args.log_dir)
    ending = Ending(
        title=scored.title,
        expected=scored.plan.total,
        thresholds=args.thresholds,
        error_limit=args.error_limit,
        as_json=args.as_json,
    )
    sys.exit(
        run_into(scored.plan, scored.store, ending, display=args.display, traffic=_traffic(args), given=scored.episodes)
    )


def _traffic(args: ScoreArgs) -> ProviderSession:
    """Return the provider session of all judge calls."""
    return ProviderSession(cache=ResponseCache(args.cache) if args.cache is not None else None)


def _load_reward(origin: ScoreOrigin, args: ScoreArgs) -> ScoringSetup:
    """Load the reward if the user trusts it. Notes about the reward are printed on standard error."""
    hook = args.changes.get("redact")
    require_trust_in([args.reward, *([hook] if isinstance(hook, str) else [])])
    with contextlib.redirect_stdout(sys.stderr):  # a user's module may print when it is loaded
        ready = load_scoring_setup(origin, args.reward, args.changes, args.pass_threshold)
    for note in ready.notes:
        echo(note, err=True)
    return ready


def _score_run(run: Path, args: ScoreArgs, output: Path | None, only_failed: bool) -> int:
    source = open_source_run(run)
    ready = _load_reward(run_origin(source.header) or ScoreOrigin({"name": source.header.task_name}, Path.cwd()), args)
    # Costs and limits of the model do not apply; only the reward runs.
    definition = ready.definition.model_copy(update={"run_limits": type(ready.definition.run_limits)()})
    ready = ready._replace(definition=definition)
    check_reward(ready.reward, checked_facts(source))
    plan = RunPlan(definition, reward=ready.reward, given=len(source.index.episodes), redaction=ready.redaction)
    folder = _open_folder(source, args, ready, plan, output)
    if only_failed and output is None:
        raise ConfigError("--only-failed continues an earlier rescoring; pass its directory with -o")
    if not (folder.path / EPISODES_FILE).exists():
        hidden = copy_results(source, folder.path, ready.redaction)
        if source.redact:
            echo(f"the text was redacted by {source.redact} when it was stored, and is scored as stored", err=True)
        if hidden:
            of = f"{hidden:,} of {len(source.index.episodes):,} episodes"
            echo(f"secrets in {of} are replaced by {HIDDEN!r}; the text is scored as stored", err=True)
    before = earlier_scores(source)

    def changes(rows: Sequence[EpisodeRow]) -> ScoreChanges:
        return compare_scores(before, rows, definition.pass_threshold)

    again = ["reward-kit", "score", str(run), "--reward", args.reward]
    for key, value in args.changes.items():
        option = key.removeprefix("reward_options.")
        typed = value if isinstance(value, str) else json.dumps(value)
        typed = "…" if SECRET_NAME.search(option) else typed  # the user has to pass it again
        again += ["-O" if option != key else "-T", f"{option}={typed}"]
    again += ["--pass-threshold", f"{args.pass_threshold:g}"] if args.pass_threshold is not None else []
    again += cache_arguments(args.cache)
    ending = Ending(
        title=f"{source.path.name}  scored again with {args.reward}",
        expected=plan.total,
        thresholds=args.thresholds,
        error_limit=args.error_limit,
        as_json=args.as_json,
        resume_command=[*again, "-o", str(folder.path)],
        further=lambda rows: {"changes": changes(rows).to_json()},
        shown=lambda rows: [_changes_table(changes(rows))],
    )
    return run_into(plan, folder, ending, display=args.display, traffic=_traffic(args), only_failed=only_failed)


def _open_folder(
    source: SourceRun, args: ScoreArgs, ready: ScoringSetup, plan: RunPlan, output: Path | None
) -> RunFolder:
    """Return the directory of the new run, or of a run that an earlier call to the same command started."""
    earlier = source.header
    files = {name: source.path / name for name in (EPISODES_FILE, SCORES_FILE)}
    rescored_from = {
        "run": str(source.path.resolve()),
        "run_id": earlier.run_id or source.path.name,
        "task_path": earlier.task_path or (earlier.rescored_from or {}).get("task_path"),
        "files": {name: hash_path(file) for name, file in files.items() if file.exists()},
        "scorer": {"id": ready.reward.id, "hash": scorer_hash(ready.reward)},
        "options": without_secrets(dict(args.options)),
    }
    path = output or new_run_path(args.log_dir, ready.definition.name)
    if not path.exists():
        header = RunHeader(
            run_id=path.name,
            task_name=ready.definition.name,
            data=str((source.path / EPISODES_FILE).resolve()),
            reward=args.reward,
            rescored_from=rescored_from,
            **({"imported": earlier.imported} if earlier.imported is not None else {}),
            task=without_secrets(ready.definition.model_dump(mode="json", exclude_defaults=True)),
            **{name: getattr(earlier, name) for name in _COLLECTED_BY},
            total=plan.total,
        )
        return RunFolder.create(path, header, ready.redaction)
    if not (path / RUN_FILE).is_file():
        raise ConfigError(f"-o {path} exists and is not a run; pass a new directory")
    if is_open_elsewhere(path):
        raise StoreError(f"{path} is open in another process; wait until it has finished")
    begun = RunHeader.read(path).rescored_from or {}
    for key, difference in _MUST_HOLD.items():
        if begun.get(key) != rescored_from[key]:
            raise ConfigError(f"-o {path}: cannot be continued ({difference}); pass a new directory")
    return RunFolder(path, ready.redaction)


def _changes_table(changes: ScoreChanges) -> RenderableType:
    """Return a table with one column for each policy.

    The episodes whose scores changed the most are listed below the table.
    """
    table = Table(title=Text("What changed", "bold"), box=box.SIMPLE_HEAVY, title_justify="left")
    table.add_column("", style="dim", no_wrap=True)
    for policy in changes.policies:
        table.add_column(Text(printable(policy.policy)), justify="right", overflow="fold")
    policies = changes.policies
    rows: dict[str, list[str]] = {
        "mean score before": [interval_text(one.before) for one in policies],
        "mean score now": [interval_text(one.after) for one in policies],
        "difference, paired": [difference_text(one.difference) for one in policies],
        "episodes scored both times": [f"{one.paired:,}" for one in policies],
        "higher / lower / equal": [
            f"{one.episodes.up:,} / {one.episodes.down:,} / {one.episodes.same:,}" for one in policies
        ],
        "failed before, pass now": [f"{one.episodes.to_passed:,}" for one in policies],
        "passed before, fail now": [f"{one.episodes.to_failed:,}" for one in policies],
        "samples higher / lower / equal": [
            f"{one.samples_up:,} / {one.samples_down:,} / {one.samples_same:,}" for one in policies
        ],
    }
    if any(one.episodes.lost for one in policies):
        rows["scored before, not now"] = [f"{one.episodes.lost:,}" for one in policies]
    if any(one.episodes.gained for one in policies):
        rows["scored now, not before"] = [f"{one.episodes.gained:,}" for one in policies]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    if not changes.moved:
        return table
    moved = Table(title=Text("Largest changes", "bold"), box=box.SIMPLE, title_justify="left")
    moved.add_column("episode", overflow="fold")
    for name in ("before", "now"):
        moved.add_column(name, justify="right")
    for one in changes.moved:
        moved.add_row(Text(printable(one.rollout_id)), figure(one.before), figure(one.after))
    return Group(table, moved)

"""Options shared by multiple commands, with their types and shell completion.

This module must not import heavy modules, because help and completion must stay fast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from reward_kit.cli.echo import echo
from reward_kit.errors import ConfigError
from reward_kit.runs.files import RUN_FILE

if TYPE_CHECKING:
    from reward_kit.runs.summary import Threshold

LATEST = "latest"
"""The value of `--resume` without a run."""
_MOST_RUNS = 50
_NO_RUN = (
    "no runs in {}; start one with `reward-kit run`, specify a run, or pass the directory of the runs with --log-dir"
)
_COMPLETABLE = re.compile(r"[\w@%+=:,./-]+")  # bash inserts a value unquoted, so it must not contain shell syntax


class SectionedCommand(click.Command):
    """A command whose help groups its options.

    Args:
        sections: maps the title of each section to the names of its parameters. All other parameters are listed under
            "Output".
    """

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._title_of = {name: title for title, names in sections.items() for name in names}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group of options. The groups are ordered by their first option."""
        records: dict[str, list[tuple[str, str]]] = {title: [] for title in self._title_of.values()}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None:
                records.setdefault(self._title_of.get(parameter.name or "", "Output"), []).append(record)
        for title, lines in records.items():
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


# Values


class Number(click.FloatRange):
    """A finite number within bounds. NaN is rejected, because it would pass every gate."""

    name = "number"

    def _describe_range(self) -> str:
        return super()._describe_range() if self.min is not None or self.max is not None else ""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        found: float = super().convert(value, param, ctx)
        return found if math.isfinite(found) else self.fail(f"{value!r} is not a finite number.", param, ctx)


class WholeNumber(click.IntRange):
    """An integer within bounds."""

    name = "integer"


class GateNumber(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5
    """A number for the score (`X`) or for a metric (`METRIC=X`).

    Args:
        least: the lowest valid number, or None for no limit.
        hint: what the user should do if the value is not a number.
    """

    name = "number"

    def __init__(self, least: float | None = None, hint: str = "use METRIC=X, or X for the score") -> None:
        self._number, self._hint = Number(least), hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, str | None]:
        """Return the number and the name of the metric. The name is `None` for the score."""
        if isinstance(value, tuple):
            return value
        metric, separator, number = str(value).rpartition("=")
        try:
            float(number)
        except ValueError:
            self.fail(f"{number!r} is not a number; {self._hint}", param, ctx)
        if separator and not metric.strip():
            self.fail(f"{value!r} has no metric name; {self._hint}", param, ctx)
        return self._number.convert(number, param, ctx), metric.strip() or None


# Options


def fail_under_options(of: str) -> Callable[[Any], Any]:
    """Return a decorator that adds `--fail-under`, which may be repeated, and `--lower-bound`."""
    fail_under = click.option(
        "--fail-under",
        type=GateNumber(),
        multiple=True,
        metavar="[METRIC=]X",
        help=f"Exit with code 1 if {of} (or the mean of METRIC) is below X; may be repeated.",
    )
    lower_bound = click.option(
        "--lower-bound",
        is_flag=True,
        help="With --fail-under: use the lower bound of the confidence interval instead of the mean.",
    )
    return lambda command: fail_under(lower_bound(command))


def fail_on_error_option(command: Any) -> Any:
    """Add `--fail-on-error`, whose parameter is named `error_limit`."""
    text = "Stop if more than X episodes ended with an error. By default, any error fails --fail-under at the end."
    return click.option("--fail-on-error", "error_limit", type=Number(0), metavar="X", help=text)(command)


def thresholds(fail_under: Iterable[tuple[float, str | None]], lower_bound: bool) -> tuple[Threshold, ...]:
    """Return the thresholds set by `--fail-under` and `--lower-bound`."""
    from reward_kit.runs.summary import Threshold

    found = tuple(Threshold(least, metric, lower_bound) for least, metric in fail_under)
    if lower_bound and not found:
        raise click.UsageError("--lower-bound requires --fail-under")
    return found


def set_option(help: str, option: tuple[str, ...] = ("-T", "--set", "overrides")) -> Callable[[Any], Any]:
    """Return a repeatable option that takes KEY=VALUE. By default, the option is `-T`."""
    return click.option(*option, multiple=True, metavar="KEY=VALUE", help=help)


def json_option(help: str = "Print the summary as JSON on standard output.") -> Callable[[Any], Any]:
    """Return the option `--json`, whose parameter is named `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=help)


def display_option() -> Callable[[Any], Any]:
    """Return the option `--display`, which selects the kind of progress display."""
    return click.option(
        "--display",
        type=click.Choice(["rich", "plain", "none"]),
        help="Progress display; default: rich on a terminal, otherwise plain.",
    )


def log_dir_option(help: str) -> Callable[[Any], Any]:
    """Return the option `--log-dir`, which defaults to `runs`."""
    return click.option(
        "--log-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help=help
    )


def resume_options(command: Any) -> Any:
    """Add `--log-dir` and `--resume` to a command."""
    resume = click.option(
        "--resume",
        is_flag=False,
        flag_value=LATEST,
        metavar="[RUN]",
        shell_complete=complete_runs,
        help="Continue a run; default: the latest one.",
    )
    log_dir = log_dir_option("Directory for new runs; with --resume, the directory to search for the latest run.")
    return log_dir(resume(command))


def sandbox_options(default: str | None = None) -> Callable[[Any], Any]:
    """Return the option `--sandbox`."""
    first = f"{default}, else " if default else ""
    return click.option(
        "--sandbox",
        type=click.Choice(["in_process", "warm", "isolated"]),
        help=f"Sandbox level for the reward; default: {first}warm for your own files.",
    )


def sandbox_keys(sandbox: str | None) -> dict[str, Any]:
    """Return the dotted task key that `--sandbox` sets, and its value.

    The result is empty if the option is not set.
    """
    return {"sandbox.level": sandbox} if sandbox else {}


def cache_option(command: Any) -> Any:
    """Add `--cache`."""
    text = "Reuse model and judge answers stored in FILE, and add new answers to it."
    return click.option("--cache", type=click.Path(path_type=Path), metavar="FILE", help=text)(command)


def cache_arguments(cache: Path | None) -> list[str]:
    """Return the arguments for `--cache` in the command that resumes a run."""
    return ["--cache", str(cache)] if cache is not None else []


# RUN, the argument


def newest_run_option(what: str = "the newest run") -> Callable[[Any], Any]:
    """Return the option `--log-dir` for a command that reads a run."""
    return log_dir_option(f"Directory to search for {what} if no RUN is given.")


def run_or_newest(run: Path | None, log_dir: Path, *, except_for: Path | None = None, training: bool = False) -> Path:
    """Return the specified run or, by default, the newest run in a directory. The path of the newest run is printed."""
    from reward_kit.runs.run_folder import newest_runs

    if run is not None:
        return run
    found = newest_runs(log_dir, lambda header: training or header.training is None)
    found = [path for path in found if path != except_for]
    if not found:
        raise ConfigError(_NO_RUN.format(log_dir))
    echo(f"the newest run: {found[0]}", err=True)
    return found[0]


def two_newest(log_dir: Path) -> tuple[Path, Path]:
    """Return the two newest runs of the task that the newest run in a directory belongs to.

    The older run comes first.
    """
    from reward_kit.runs.run_folder import RunHeader, newest_runs

    found = newest_runs(log_dir, lambda header: header.training is None)
    if not found:
        raise ConfigError(_NO_RUN.format(log_dir))
    newest, name = found[0], RunHeader.read(found[0]).task_name
    earlier = [path for path in found[1:] if RunHeader.read(path).task_name == name]
    if not earlier:
        raise ConfigError(
            f"{log_dir} has only one run of task {name!r}, {newest}; specify the runs to compare, "
            "or only this run to compare its policies"
        )
    echo(f"the two newest runs of task {name!r}: {earlier[0]} (the baseline) and {newest}", err=True)
    return earlier[0], newest


def report_hidden_secrets(overrides: Mapping[str, Any], given: Mapping[str, Any], otherwise: str = "") -> list[str]:
    """Return the override keys of a resumed run whose secrets were not stored, and report the missing ones."""
    from reward_kit.runs.redaction import hidden_keys

    hidden = list(hidden_keys(overrides))
    if missing := [key for key in hidden if key not in given]:
        keys = " ".join(f"-T {key}=…" for key in missing)
        echo(f"{keys} is or contains a secret that was not stored; pass it again{otherwise}", err=True)
    return hidden


# Completion: values are looked up each time the shell requests them


def complete_runs(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the path of a run. The runs in the typed or default directory are listed, newest first."""
    folder, slash, _ = typed.rpartition("/")
    place = Path(f"{folder}{slash}" or context.params.get("log_dir") or "runs")
    changed: dict[Path, float] = {}
    for path in place.glob(f"*/{RUN_FILE}"):
        with suppress(OSError):  # the run was removed in the meantime
            changed[path.parent] = path.stat().st_mtime
    newest = sorted(changed, key=changed.__getitem__, reverse=True)[:_MOST_RUNS]
    return [CompletionItem(typed, type="dir"), *_beginning(typed, map(str, newest))]


def complete_policies(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete a policy. The suggestions are built-in policies and files."""
    from reward_kit.agent.policies import BUILT_IN

    return [CompletionItem(typed, type="file"), *_beginning(typed, BUILT_IN)]


def complete_rewards(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete a reward.

    The suggestions are built-in rewards and files or, after `FILE.py:`, the rewards in that file.
    """
    import reward_kit.rewards
    from reward_kit.checks.source_facts import rewards_in

    file, colon, _ = typed.rpartition(":")
    if colon and file.endswith(".py"):
        try:
            names = rewards_in(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, SyntaxError):
            return []
        return _beginning(typed, (f"{file}:{name}" for name in names))
    built_in = (f"reward_kit.rewards:{name}" for name in reward_kit.rewards.__all__)
    return [CompletionItem(typed, type="file"), *_beginning(typed, built_in)]


def complete_estimators(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the name of an advantage estimator."""
    from reward_kit.rl_helpers import ESTIMATORS

    return _beginning(typed, ESTIMATORS)


def complete_targets(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete a target of `check`, which is a run, a built-in resource, a reward or a file."""
    from reward_kit.environments.config import BUILT_IN

    runs = complete_runs(context, parameter, typed)[1:]
    found = [*runs, *_beginning(typed, BUILT_IN), *complete_rewards(context, parameter, typed)]
    return sorted(found, key=lambda item: item.type == "plain")  # bash drops values that come before `file`


def _beginning(typed: str, names: Iterable[Any]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(typed) and _COMPLETABLE.fullmatch(name)]

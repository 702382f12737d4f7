"""`reward-kit`: import and run the requested command, and convert an error to a one-line message and an exit code."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import click

from reward_kit.cli import operator_log
from reward_kit.cli.echo import echo, show_exception
from reward_kit.errors import RewardKitError, did_you_mean
from reward_kit.lazy import package_version

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_PREFIX = "REWARD_KIT"
COMPLETE_VARIABLE = "_REWARD_KIT_COMPLETE"  # set by the shell's completion script
_SETUP = "setup"
GROUPS: dict[str, dict[str, str]] = {
    "Evaluate": {
        "run": "Run a task file: collect and score episodes, and show a table of results.",
        "score": "Score transcripts, or score the episodes of a run with a different reward.",
        "view": "Show live pages of all runs in a browser, or write the page of one run.",
        "compare": "Compare runs, with confidence intervals and gates for CI.",
        "credit": "Compute the credit of each step of a run.",
        "why": "Continue episodes to find the steps at which they were lost or won.",
        "export": "Export a run as tables, as chats for fine-tuning, or as logs for other tools.",
        "import": "Make a run from logs of other tools, or a task from an OpenAI eval.",
        "check": "Check a task, a reward or a resource before a run, or a finished run.",
        "calibrate": "Compare a reward, such as an LLM judge, with human labels.",
    },
    "Train": {
        "train": "Train a policy as configured in a train file.",
        "sweep": "Compare training settings over several seeds.",
        "serve": "Serve reward functions over HTTP to trainers on other machines.",
    },
    "Setup": {
        "init": "Create a small working project.",
        "doctor": "Check the sandbox, packages and endpoints of this machine.",
        "runs": "List runs, and remove old runs.",
    },
}
"""The visible commands with their summaries, in the groups of `--help`."""
HIDDEN = {
    "schema": "Print the JSON schema of task, train or sweep files, for your editor.",
    "agent-eval": "Run a task file, as reward-kit 0.4 did: `--task-def T.yaml` and the options of `run`.",
    "completion": "Print the TAB completion script for your shell.",
}
"""Commands that are not listed by `--help`."""
VERBS = {name: summary for group in (*GROUPS.values(), HIDDEN) for name, summary in group.items()}
_MODULES = {"init": _SETUP, "schema": _SETUP, "completion": _SETUP, "agent-eval": "run", "import": "import_logs"}
"""The modules of commands whose module has a different name. In a module of several commands, the command is the
function with its name."""
_ALIASES = {
    "rescore": "score RUN",
    "explain": "train --dry-run",
    "report": "view RUN -o report.html",
    **dict.fromkeys(("eval", "evaluate", "start", "exec", "resume"), "run"),
    **dict.fromkeys(("test", "lint", "validate", "verify"), "check"),
    **dict.fromkeys(("grade", "judge"), "score"),
    **dict.fromkeys(("diff", "cmp"), "compare"),
    **dict.fromkeys(("show", "open", "ui", "web"), "view"),
    **dict.fromkeys(("advantages", "estimate"), "credit"),
    **dict.fromkeys(("convert", "dump", "save"), "export"),
    **dict.fromkeys(("load", "ingest"), "import"),
    **dict.fromkeys(("finetune", "fit", "learn"), "train"),
    **dict.fromkeys(("server",), "serve"),
    **dict.fromkeys(("new", "create", "quickstart"), "init"),
    **dict.fromkeys(("info", "status", "env"), "doctor"),
    **dict.fromkeys(("list", "ls", "logs", "prune", "clean"), "runs"),
}
"""The commands to suggest for names from other programs and earlier releases."""


EXIT_CODES = {
    0: "Success; every gate passed.",
    1: "A gate or a limit of the run failed, such as `--fail-under`, or `check` or `doctor` found a problem.",
    2: "Wrong usage or configuration, such as an option, a task file or a path. Nothing was run.",
    3: "The run itself failed, or every episode ended with an error.",
    130: "Stopped by Ctrl-C or SIGTERM; finished work is kept, and `--resume` continues.",
}
"""The meaning of each exit code."""


class LazyGroup(click.Group):
    """A command group that imports a command's module only when the command is called, to keep --help fast."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the visible commands, in the order of `--help`."""
        return [name for group in GROUPS.values() for name in group]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import and return a command."""
        if name not in VERBS:
            return None
        module = import_module(module_of(name))
        own_name = name.replace("-", "_") if name in _MODULES else "command"
        command: click.Command = getattr(module, own_name, None) or module.command
        return _with_common_options(command, f"{_PREFIX}_{name}")

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command like click, but suggest a similar command if the command is unknown."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            meant = _ALIASES.get(args[0])
            near = f"; did you mean {meant!r}?" if meant else did_you_mean(args[0], VERBS)
            context.fail(f"unknown command {args[0]!r}{near}")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands and their summaries without importing any command."""
        width = max(len(name) for group in GROUPS.values() for name in group)
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in group.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands and options without importing any command."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        commands = [CompletionItem(name, help=VERBS[name]) for name in names]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]


def module_of(name: str) -> str:
    """Return the name of a command's module."""
    return f"reward_kit.cli.{_MODULES.get(name, name)}"


def _verbose() -> click.Option:
    """Apply `-v`, which may be placed before or after the command."""
    return click.Option(
        ["-v", "--verbose"],
        count=True,
        expose_value=False,
        callback=_show_logs,
        help="Log progress on standard error; -vv logs more.",
    )


def _show_logs(context: click.Context, option: click.Parameter, times: int) -> None:
    meta = context.find_root().meta
    meta["verbose"] = max(times, meta.get("verbose", 0))
    if not context.resilient_parsing:
        operator_log.begin(meta["verbose"])


def _with_common_options(command: click.Command, prefix: str) -> click.Command:
    """Add `-v` to a command and an environment variable to each of its options."""
    for name, inner in getattr(command, "commands", {}).items():
        _with_common_options(inner, f"{prefix}_{name}")
    if any("--verbose" in option.opts for option in command.params):
        return command
    options = [option for option in command.params if isinstance(option, click.Option)]
    for option in options:
        longest = max(option.opts, key=len)
        option.envvar = option.envvar or f"{prefix}_{longest.removeprefix('--')}".replace("-", "_").upper()
    if options:
        example = max(options[0].opts, key=len)
        command.epilog = f"Options can also be set by environment variables, such as {example} as {options[0].envvar}."
    command.params.append(_verbose())
    return command


def _show_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        echo(f"reward-kit, version {package_version()}")
        context.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[_verbose()],
    epilog="agent-eval, the command of reward-kit 0.4, is an alias of run.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version.",
)
def program() -> None:
    """Evaluate language-model agents, and train them with credit for every step.

    \b
    Start with:
      reward-kit init my_evaluation
      cd my_evaluation
      reward-kit run task.yaml
    """


def main() -> None:
    """Run the command line. This is the console entry point. It exits with one of `EXIT_CODES`."""
    sys.excepthook = show_exception
    try:
        code = program(auto_envvar_prefix=_PREFIX, complete_var=COMPLETE_VARIABLE, standalone_mode=False)
    except RewardKitError as error:
        _show_error(error, error)
        _leave(error.exit_code)
    except ExceptionGroup as group:
        ours = _find_own_error(group)
        _show_error(ours, group)
        _leave(ours.exit_code)
    except click.ClickException as error:
        error.show(shown := io.StringIO())  # it may quote arguments, such as names of files
        echo(shown.getvalue(), err=True, nl=False)
        _leave(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _leave(130)
    except SystemExit as leaving:
        _leave(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    _leave(code if isinstance(code, int) else 0)


def _show_error(error: RewardKitError, noted: Exception) -> None:
    """Print an error on one line, followed by the notes on the error and on its exception group."""
    echo(f"error: {error}", err=True)
    for note in getattr(noted, "__notes__", ()):
        echo(note, err=True)


def _find_own_error(group: ExceptionGroup[Exception]) -> RewardKitError:
    """Return the first `RewardKitError` in an exception group.

    If the group contains none, the error is a bug, so the group is raised again.
    """
    ours: Exception | None = group.subgroup(RewardKitError)
    while isinstance(ours, ExceptionGroup):
        ours = ours.exceptions[0]
    if not isinstance(ours, RewardKitError):
        raise group
    return ours


def _leave(code: int) -> NoReturn:
    """Exit without waiting for threads, because a user's function may hang in one of them."""
    if threading.active_count() > 1:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()

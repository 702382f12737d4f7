"""`reward-kit`: finds the verb, loads its file alone, and turns errors into one line and an exit code."""

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

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_PREFIX = "REWARD_KIT"
COMPLETE_VARIABLE = "_REWARD_KIT_COMPLETE"  # set by the script of a shell, when it asks
VERBS: dict[str, str] = {
    "init": "Write a small project that works, to be changed into your own.",
    "run": "Run a task file: collect episodes, score them, show a table.",
    "score": "Score transcripts you already have.",
    "rescore": "Score the episodes of a run again by another reward, and show what changed.",
    "export": "Write a run as tables or as chats for fine-tuning: Parquet, CSV, JSON lines.",
    "report": "Write one page on a run: scores, failures, cost, times, every episode.",
    "view": "Show the pages of all runs of a folder in a browser, live while runs go on.",
    "compare": "Set runs beside the first: differences with intervals, samples won and lost, gates for CI.",
    "credit": "Say what each step of a run was worth, by any estimator.",
    "train": "Train a policy as a train file says, with everything on disk that a resume needs.",
    "calibrate": "Set a reward, such as an LLM judge, against human labels.",
    "check": "Check a task, a reward or a resource before it costs anything, or a run after it.",
    "serve": "Serve reward functions over HTTP, to trainers on other machines.",
    "doctor": "Show what this machine offers, and what is missing.",
    "runs": "List runs, and remove old ones.",
    "schema": "Print the JSON schema of task files or train files, for your editor.",
    "completion": "Print the script by which your shell completes commands at TAB.",
}


EXIT_CODES = {
    0: "It worked, and every gate was passed.",
    1: "A gate failed: `--fail-under`, `--fail-on-error`, a limit of the run, findings of `check`, a wall of `doctor`.",
    2: "Wrong usage or configuration: an option, a task file, a path. Nothing was run.",
    3: "The run itself failed, or every episode of it broke.",
    130: "It was stopped, by Ctrl-C or SIGTERM; what was done is kept, and `--resume` goes on.",
}
"""What each exit code of the program says."""


class LazyGroup(click.Group):
    """A group whose verbs are imported when they are called, so that --help and a typo cost nothing."""

    def list_commands(self, context: click.Context) -> list[str]:
        """The verbs in the order a newcomer needs them."""
        return list(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """The verb of this name, loaded now."""
        if name not in VERBS:
            return None
        command: click.Command = import_module(f"reward_kit.cli.{name.replace('-', '_')}").command
        return _as_every_verb(command, f"{_PREFIX}_{name}")

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest verb offered for a misspelt one."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            context.fail(f"no command {args[0]!r}{did_you_mean(args[0], VERBS)}")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs with their summaries, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The verbs and options that begin so, without importing any verb."""
        from click.shell_completion import CompletionItem

        verbs = [CompletionItem(name, help=told) for name, told in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]


def _verbose() -> click.Option:
    """`-v`, which may stand before and behind the verb."""
    return click.Option(
        ["-v", "--verbose"],
        count=True,
        expose_value=False,
        callback=lambda context, option, times: _show_logs(context, times),
        help="Show what is going on, on standard error; -vv shows more.",
    )


def _show_logs(context: click.Context, times: int) -> None:
    told = context.find_root().meta
    told["verbose"] = max(times, told.get("verbose", 0))
    if not context.resilient_parsing:
        operator_log.begin(told["verbose"])


def _as_every_verb(command: click.Command, prefix: str) -> click.Command:
    """With what every verb has: `-v`, and a line on how the environment gives its options."""
    for name, inner in getattr(command, "commands", {}).items():
        _as_every_verb(inner, f"{prefix}_{name}")
    if any("--verbose" in option.opts for option in command.params):
        return command
    options = [option for option in command.params if isinstance(option, click.Option)]
    if options:
        command.epilog = f"Options may stand in the environment too: {_by_environment(options[0], prefix)}."
    command.params.append(_verbose())
    return command


def _by_environment(option: click.Option, prefix: str) -> str:
    longest = max(option.opts, key=len)
    variable = f"{prefix}_{longest.removeprefix('--')}".replace("-", "_").upper()
    return f"{longest} as {variable}"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, params=[_verbose()])
@click.version_option(package_name="reward-kit", prog_name="reward-kit")
def program() -> None:
    """Evaluate language-model agents, and train them with credit for every step.

    \b
    Start with:
      reward-kit init my_evaluation
      cd my_evaluation
      reward-kit run task.yaml
    """


def main() -> None:
    """The console entry point, which exits with one of `EXIT_CODES`."""
    _complete_whole_words()
    sys.excepthook = show_exception
    try:
        code = program(auto_envvar_prefix=_PREFIX, complete_var=COMPLETE_VARIABLE, standalone_mode=False)
    except RewardKitError as error:
        echo(f"error: {error}", err=True)
        _leave(error.exit_code)
    except ExceptionGroup as group:
        ours = _first_of_ours(group)
        echo(f"error: {ours}", err=True)
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


def _complete_whole_words() -> None:
    """Have click answer bash in our way, where it is bash that asks."""
    if COMPLETE_VARIABLE in os.environ:
        from click.shell_completion import add_completion_class

        from reward_kit.cli.completing import WholeWords

        add_completion_class(WholeWords)


def _first_of_ours(group: ExceptionGroup[Exception]) -> RewardKitError:
    """The first of our errors that task groups wrapped; a group without one is a bug of ours and is shown whole."""
    ours: Exception | None = group.subgroup(RewardKitError)
    while isinstance(ours, ExceptionGroup):
        ours = ours.exceptions[0]
    if not isinstance(ours, RewardKitError):
        raise group
    return ours


def _leave(code: int) -> NoReturn:
    """Exit, also where a user's function hangs in a thread, for which the interpreter would wait for ever."""
    if threading.active_count() > 1:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()

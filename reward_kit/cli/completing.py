"""What a shell offers at TAB beyond verbs and options: runs, policies, rewards, estimators; and its words, in bash.

Each value is found when it is asked for, by which time the verb is loaded: nothing here costs a start anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, split_arg_string

_MOST_RUNS = 50
_ACTED_ON, _BACKSLASHED = re.compile(r"[^\w@%+=:,./-]"), r"\\\g<0>"
_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' lines line type value
    mapfile -t lines < <(COMP_LINE="${COMP_LINE:0:$COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    for line in "${lines[@]}"; do
        IFS=',' read -r type value <<< "$line"
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class WholeWords(BashComplete):
    """Bash with words as they were typed: by itself it cuts `reward_kit.rewards:NAME` at the colon."""

    source_template = _BASH

    def source(self) -> str:
        """The script, without asking which bash is there: it is printed for another shell, perhaps elsewhere."""
        return self.source_template % self.source_vars()

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the cursor, and the one at it."""
        line = os.environ["COMP_LINE"]
        words = split_arg_string(line)[1:]
        typed = words.pop() if words and not line[-1].isspace() else ""
        value = typed.partition("=")[2] if typed.startswith("-") else typed
        cuts = (mark for mark in ":=" if mark in os.environ.get("COMP_WORDBREAKS", ""))
        self._left_out = value[: max((value.rfind(mark) + 1 for mark in cuts), default=0)]
        return words, typed

    def format_completion(self, item: CompletionItem) -> str:
        """One line of the answer; what bash takes for words of their own is not said again.

        Bash puts it into the line as it is, so what a shell acts on, which a folder's name may hold, is escaped.
        """
        rest = item.value.removeprefix(self._left_out)
        return f"{item.type},{_ACTED_ON.sub(_BACKSLASHED, rest) if item.type == 'plain' else rest}"


def runs(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The runs of the folder that is typed, of the one for runs before any is; the newest first."""
    from reward_kit.runs.header import FILE

    folder, slash, _ = typed.rpartition("/")
    place = Path(f"{folder}{slash}" or context.params.get("log_dir") or "runs")
    found = sorted(place.glob(f"*/{FILE}"), key=_changed_at, reverse=True)[:_MOST_RUNS]
    return [CompletionItem(typed, type="dir"), *_beginning(typed, (str(path.parent) for path in found))]


def policies(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The policies that ship with the package, or a file with one's own."""
    from reward_kit.agent.policies import BUILT_IN

    return [CompletionItem(typed, type="file"), *_beginning(typed, BUILT_IN)]


def rewards(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The rewards that ship with the package, or a file with one's own; behind `FILE.py:` those in the file."""
    import reward_kit.rewards
    from reward_kit.reward_checks.source_facts import rewards_in

    file, colon, _ = typed.rpartition(":")
    if colon and file.endswith(".py"):
        try:
            names = rewards_in(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, SyntaxError):
            return []
        return _beginning(typed, (f"{file}:{name}" for name in names))
    built_in = (f"reward_kit.rewards:{name}" for name in reward_kit.rewards.__all__)
    return [CompletionItem(typed, type="file"), *_beginning(typed, built_in)]


def estimators(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The advantage estimators."""
    from reward_kit.rl_helpers import ESTIMATORS

    return _beginning(typed, ESTIMATORS)


def targets(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """What can be checked: runs, resources that ship with the package, rewards, files."""
    from reward_kit.environments.config import BUILT_IN

    found = [*runs(context, parameter, typed)[1:], *_beginning(typed, BUILT_IN), *rewards(context, parameter, typed)]
    return sorted(found, key=lambda item: item.type == "plain")  # bash forgets what it was told before it is told this


def _beginning(typed: str, names: Iterable[Any]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(typed) and name.isprintable()]


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # somebody removed it just now
        return 0.0

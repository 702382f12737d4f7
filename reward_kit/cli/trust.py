"""The `--trust` option, and the prompt shown before a command runs code from a directory for the first time."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reward_kit.cli.echo import echo
from reward_kit.display_text import escape_text, pluralize
from reward_kit.errors import ConfigError, StoreError

if TYPE_CHECKING:  # the commands that need task file readers import them
    from reward_kit.runs.trust import PlannedCode

VARIABLE = "REWARD_KIT_TRUST"
_META = "reward_kit.trust"
_LINES = 20
_LINE_CHARS = 200


def trust_option(command: Callable[..., Any]) -> Any:
    """Add the option `--trust` to a command that runs user code."""

    def remember(context: click.Context, option: click.Parameter, is_given: bool) -> None:
        source = context.get_parameter_source(option.name or "")
        context.meta[_META] = is_given
        context.meta[f"{_META}.typed"] = is_given and source is click.core.ParameterSource.COMMANDLINE

    return click.option(
        "--trust",
        is_flag=True,
        envvar=VARIABLE,
        expose_value=False,
        callback=remember,
        help=f"Run the code without a prompt, now and in the future; in CI, set {VARIABLE}=1.",
    )(command)


def require_trust_in_file(
    path: Path, typed: Mapping[str, Any] | None = None, stored: Mapping[str, Any] | None = None
) -> bool:
    """Raise an error unless the user trusts the code that a task file or train file runs.

    On a terminal, prompt the user.
    """
    from reward_kit.runs.trust import plan_file_code

    return _require(plan_file_code(path, typed, stored), str(path))


def require_trust_in_sweep(path: Path, train: Path, arms: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error unless the user trusts the code that the arms of a sweep file run.

    On a terminal, prompt the user.
    """
    from reward_kit.runs.trust import plan_file_code

    codes = [plan_file_code(train, None, overrides) for overrides in arms]
    settings = [*dict.fromkeys(itertools.chain(*(code.settings for code in codes)))]
    stored = [*dict.fromkeys(itertools.chain(*(code.stored for code in codes)))]
    files = {file: digest for code in codes for file, digest in code.files.items()}
    _require(replace(codes[0], files=files, settings=settings, stored=stored), str(path))


def require_trust_in(references: Sequence[str], folder: Path | None = None) -> None:
    """Raise an error unless the user trusts the code referenced as `file.py:name`.

    On a terminal, prompt the user.
    """
    from reward_kit.runs.trust import plan_reference_code

    _require(plan_reference_code(references, folder or Path.cwd()), ", ".join(references))


def trust_new_folder(folder: Path) -> None:
    """Record that the user created a directory. The code in it is then trusted without a prompt."""
    from reward_kit.runs.trust import PlannedCode, trust

    try:
        trust(PlannedCode(folder.resolve()), always=True)
    except StoreError as error:
        echo(f"note: {error}; the first run will ask whether to trust {folder}", err=True)


def _require(code: PlannedCode, what: str) -> bool:
    from reward_kit.runs.trust import untrusted

    meta = click.get_current_context().meta
    files, settings = untrusted(code)
    if (files or settings) and not meta.get(_META):
        _ask(code, files, what)
    elif meta.get(f"{_META}.typed"):
        _record(code)
    else:  # the user has agreed to the settings that were typed, even if an environment variable allows everything
        _record(replace(code, files={}, stored=()))
        return not settings
    return True


def _ask(code: PlannedCode, files: Sequence[Path], what: str) -> None:
    lines = "\n".join(describe_code(replace(code, files={file: code.files[file] for file in files})))
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(
            f"{what} would run code that is not trusted yet; nothing was run:\n{lines}\n"
            f"If you trust it, add --trust to this command:\n  {shlex.join(['reward-kit', *sys.argv[1:], '--trust'])}\n"
            f"or set {VARIABLE}=1, e.g. in CI"
        )
    echo(f"{what} would run code that is not trusted yet:\n{lines}", err=True)
    answer = click.prompt(
        "Run it?  y: yes, ask again if it changes   a: always in this directory   n: no",
        type=click.Choice(["y", "a", "n"]),
        default="n",
        show_choices=False,
        err=True,
    )
    if answer == "n":
        raise ConfigError(f"{what} is not trusted; nothing was run")
    _record(code, always=answer == "a")


def describe_code(code: PlannedCode) -> Iterator[str]:
    """Yield lines that describe the code to run: first the settings, then the files."""
    lines = list(code.settings)
    for file in code.files:
        name = str(file.relative_to(code.folder) if file.is_relative_to(code.folder) else file)
        lines.append(f"file: {name if name.isprintable() else repr(name)}")
    yield f"  in {escape_text(str(code.folder), _LINE_CHARS)}"
    yield from (f"    {escape_text(line, _LINE_CHARS)}" for line in lines[:_LINES])
    if len(lines) > _LINES:
        yield f"    … and {pluralize(len(lines) - _LINES, 'line')} more"


def _record(code: PlannedCode, *, always: bool = False) -> None:
    from reward_kit.runs.trust import trust

    try:
        trust(code, always=always)
    except StoreError as error:
        echo(f"note: {error}; you will be asked again", err=True)

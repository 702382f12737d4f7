"""Generate the page of the command line from the click program."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
from markdown_texts import code, inline, table

from reward_kit.cli.main import EXIT_CODES, VERBS, program

PREFIX = "REWARD_KIT"
_EXAMPLES = re.compile(r"^Examples?:\s*")
_EXITS = re.compile(r"\bexit with (code )?1\b", re.IGNORECASE)
_INTRO = """# Command line

This page lists every command with all options. `reward-kit COMMAND --help` shows the same information.

You can also set each option with the environment variable below it. Options override the environment, which overrides
the task file. Output of user code goes to standard error; standard output contains only the table or, with `--json`,
one JSON object. `-v` logs to standard error, and `-vv` logs more; `-h` or `--help` shows the help.
"""


def page() -> str:
    """Return the page."""
    verbs = table(
        ["Command", "Purpose"], [(f"[`reward-kit {verb}`](#{verb})", inline(text)) for verb, text in VERBS.items()]
    )
    exits = table(["Exit code", "Meaning"], [(code(str(number)), inline(text)) for number, text in EXIT_CODES.items()])
    root = click.Context(program, info_name="reward-kit", auto_envvar_prefix=PREFIX)
    parts = [_INTRO, verbs, f"\n## Exit codes {{ #exit-codes }}\n\n{exits}"]
    for verb in VERBS:
        command = program.get_command(root, verb)
        assert command is not None, verb
        parts += _sections(command, click.Context(command, info_name=verb, parent=root), 2)
    return "\n".join(parts) + "\n"


def _sections(command: click.Command, context: click.Context, depth: int) -> Iterator[str]:
    """Yield the sections of a command and its subcommands."""
    words = context.command_path
    yield f"\n{'#' * depth} {words} {{ #{'-'.join(words.split()[1:])} }}\n"
    yield from _described(command)
    usage = " ".join([words, *command.collect_usage_pieces(context)])
    yield f"\n```text\n{usage}\n```\n"
    if rows := [row for row in (_row(one, context) for one in command.params) if row]:
        yield table(["Option", "Meaning and environment variable", "Default"], rows) + "\n"
    if gates := [one for one in command.params if isinstance(one, click.Option) and _EXITS.search(one.help or "")]:
        named = ", ".join(code(max(one.opts, key=len)) for one in gates)
        yield f"Exits with 1 if a gate fails: {named}. See also the [common exit codes](#exit-codes).\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            yield from _sections(inner, click.Context(inner, info_name=name, parent=context), depth + 1)


def _described(command: click.Command) -> Iterator[str]:
    """Yield the help text: paragraphs, then examples."""
    for paragraph in (command.help or "").replace("\b\n", "").split("\n\n"):
        text = paragraph.strip()
        if not _EXAMPLES.match(text):
            yield f"{inline(text)}\n"
            continue
        lines = [line.strip() for line in _EXAMPLES.sub("", text).splitlines()]
        yield "```sh\n" + "\n".join(line for line in lines if line) + "\n```\n"


def _row(param: click.Parameter, context: click.Context) -> tuple[str, str, str] | None:
    """Return the row of an option; arguments are in the usage, `-v` and `-h` are common to all commands."""
    if not isinstance(param, click.Option) or param.hidden or param.name in ("verbose", "help"):
        return None
    record = param.get_help_record(context)
    assert record is not None, param.name
    extra = param.get_help_extra(context)
    text = inline(param.help or "")
    if bounds := extra.get("range"):
        text += f" ({code(bounds)})"
    if extra.get("required"):
        text += " Required."
    names = ", ".join(code(name) for name in _names(record[0]))
    if isinstance(param.type, click.Choice):
        # Otherwise the first column would be wider than a phone.
        names = names.replace(code(f" {param.make_metavar(context)}").strip("`"), "")
        text += f" One of {', '.join(code(str(word)) for word in param.type.choices)}."
    variable = code(_variable(param, context))
    return names, "<br>".join(part for part in (text, variable) if part), code(extra.get("default", ""))


def _names(record: str) -> list[str]:
    """Return the names of an option as in its help, the last one with its metavar."""
    return re.split(r", (?=-)| / (?=-)", record)


def _variable(option: click.Option, context: click.Context) -> str:
    """Return the environment variable of an option."""
    if option.envvar:
        return option.envvar if isinstance(option.envvar, str) else next(iter(option.envvar))
    prefix = context.auto_envvar_prefix
    return f"{prefix}_{(option.name or '').upper()}" if prefix and option.allow_from_autoenv else ""

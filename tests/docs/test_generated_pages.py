"""Test that the generated pages of the docs are complete and match the program."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import get_args

import click
import pytest

import reward_kit
from reward_kit.agent.models import StopReason
from reward_kit.cli.main import EXIT_CODES, HIDDEN, VERBS, program
from reward_kit.credit.group_filter import DropReason
from reward_kit.errors import CLASS_MEANINGS, FAILURE_CLASSES, ConfigError, RewardKitError
from reward_kit.sandbox.outcome import MEANINGS, OutcomeKind
from tests.docs.conftest import DOCS, Maker

IMPORTED = re.compile(r"^\s*from (reward_kit\.integrations[\w.]*) import \(?([\w, ]+)", re.MULTILINE)


def all_commands(group: click.Group, context: click.Context) -> dict[str, click.Command]:
    found = {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found[name] = command
        if isinstance(command, click.Group):
            inner = all_commands(command, click.Context(command, info_name=name, parent=context))
            found |= {f"{name} {verb}": one for verb, one in inner.items()}
    return found


class TestCommandLinePage:
    def test_every_command_is_listed_with_every_option(self, maker: Maker) -> None:
        page = maker("command_line_page").page()
        commands = all_commands(program, click.Context(program, info_name="reward-kit"))
        assert commands.keys() > VERBS.keys() - HIDDEN.keys() and "runs prune" in commands
        for name, command in commands.items():
            section = page.split(f" reward-kit {name} {{ #{name.replace(' ', '-')} }}\n")[1].split("\n## ")[0]
            for option in command.params:
                if isinstance(option, click.Option) and option.name not in ("verbose", "help"):
                    assert f"`{max(option.opts, key=len)}" in section, f"{name} {option.name}"

    def test_option_row_has_default_bounds_and_working_variable(
        self, maker: Maker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page = maker("command_line_page").page()
        assert (
            "| `--max-concurrency INTEGER` | Maximum number of concurrent episodes. "
            "(`x>=1`)<br>`REWARD_KIT_RUN_MAX_CONCURRENCY` | `16` |"
        ) in page
        for variable in re.findall(r"REWARD_KIT_RUNS_\w+", page):
            monkeypatch.setenv(variable, "1")
        runs = program.get_command(click.Context(program), "runs")
        assert isinstance(runs, click.Group)
        above = click.Context(runs, info_name="runs", auto_envvar_prefix="REWARD_KIT_RUNS")
        context = runs.commands["prune"].make_context("prune", [], parent=above)
        assert (context.params["keep"], str(context.params["log_dir"])) == (1, "1")

    def test_examples_are_commands_without_help_formatting(self, maker: Maker) -> None:
        page = maker("command_line_page").page()
        assert "```sh\nreward-kit runs prune --keep 5\nreward-kit runs prune" in page
        assert "\b" not in page and "Examples:" not in page

    def test_exit_codes_include_those_of_errors(self, maker: Maker) -> None:
        page = maker("command_line_page").page()
        assert all(f"| `{number}` | {text} |" in page for number, text in EXIT_CODES.items())
        assert {RewardKitError.exit_code, ConfigError.exit_code} <= EXIT_CODES.keys()
        assert "Exits with 1 if a gate fails: `--fail-on-regression`, `--fail-under`." in page


class TestSchemaPages:
    @pytest.mark.parametrize(
        ("name", "line"),
        [
            ("task_page", "| `tool_time_s` | number, above 0 | `60.0` | Seconds for one call of a tool. |"),
            ("task_page", "| `start_command` | text | required |"),
            ("task_page", "| `noise` | `independent`, `shared` | `independent` | `shared`: "),
            ("task_page", "| [`tool_calls`](#messages-tool_calls) | list of blocks | none |"),
            ("train_page", "| `betas` | 2 numbers | `[0.9, 0.999]` | The betas of AdamW. |"),
            ("train_page", "| `epochs` | integer, at least 1 | `1` | The number of passes over the batch. |"),
            ("train_page", "One of `held_out/score`, `held_out/passed_share`,"),
        ],
    )
    def test_key_row_has_type_default_bounds_and_description(self, maker: Maker, name: str, line: str) -> None:
        assert line in getattr(maker("schema_pages"), name)()

    @pytest.mark.parametrize("name", ["task_page", "train_page"])
    def test_every_block_has_a_section_and_every_key_a_description(self, maker: Maker, name: str) -> None:
        page = getattr(maker("schema_pages"), name)()
        rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| \[?`", line)]
        assert len(rows) > 80
        assert [row[0] for row in rows if not row[-1].strip(" |")] == []
        places = re.findall(r"\{ #([\w-]+) \}", page)
        assert len(places) == len(set(places)) > 10
        assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= set(places)


class TestErrorsPage:
    def test_every_error_type_has_a_cause_and_a_fix(self, maker: Maker) -> None:
        errors_page = maker("errors_page")
        page = errors_page.page()
        types = errors_page.error_types()
        assert {"ConfigError", "TransientError", "ClusterError"} <= types.keys()
        for name, one in types.items():
            if one.module != "reward_kit.errors":
                assert re.search(rf"^\| `{name}` \|.* \| \w", page, re.MULTILINE), name
            elif name != "RewardKitError":
                section = page.split(f"### `{name}` {{")[1].split("\n##")[0]
                assert "**Likely cause**: " in section and "**What to do**: " in section, name

    def test_names_parsed_from_sources_match_imports(self, maker: Maker) -> None:
        errors_page = maker("errors_page")
        types = errors_page.error_types()
        for kind in RewardKitError.__subclasses__():
            if kind.__module__ == "reward_kit.errors":
                found = types[kind.__name__]
                assert errors_page.inherited(found, "failure_class", types) == kind.failure_class
                assert int(errors_page.inherited(found, "exit_code", types)) == kind.exit_code

    def test_every_failure_class_and_reason_is_listed(self, maker: Maker) -> None:
        page = maker("errors_page").page()
        assert CLASS_MEANINGS.keys() == set(FAILURE_CLASSES)
        kinds = {kind for part in get_args(OutcomeKind) for kind in get_args(part)}
        assert MEANINGS.keys() == kinds
        told = [*FAILURE_CLASSES, *StopReason, *DropReason, *(kinds - {"ok"})]
        assert [word for word in told if not re.search(rf"^\| `{word}` \| .*\w", page, re.MULTILINE)] == []


class TestPythonReference:
    def test_index_lists_every_public_name(self, maker: Maker) -> None:
        index = maker("python_pages").index_page()
        assert [name for name in reward_kit.__all__ if f"**[`{name}`][" not in index] == []

    def test_index_lists_every_name_the_docs_import(self, maker: Maker) -> None:
        index = maker("python_pages").index_page()
        texts = [path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))]
        used = {
            (module, name.strip())
            for text in texts
            for module, names in IMPORTED.findall(text)
            for name in names.split(",")
            if name.strip()
        }
        assert len(used) > 15
        others = [(module, name) for module, name in used if not re.search(rf"\[{module}(\.\w+)*\.{name}\]", index)]
        defined_in = {name: getattr(importlib.import_module(module), name).__module__ for module, name in others}
        assert sorted(name for name, module in defined_in.items() if f"[{module}.{name}]" not in index) == []

    def test_name_is_shown_once_where_it_is_defined(self, maker: Maker) -> None:
        python_pages = maker("python_pages")
        pages = "\n".join(python_pages.group_page(group) for group in python_pages.GROUPS)
        shown = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
        assert len(shown) == len(set(shown)) > 150
        assert "reward_kit.rl.losses.ppo_clip_loss" in shown
        assert not set(shown) & python_pages.shown_elsewhere()

    def test_every_name_has_a_summary(self, maker: Maker) -> None:
        python_pages = maker("python_pages")
        names = [one for group in python_pages.GROUPS for part in python_pages.names_of(group).values() for one in part]
        assert [one.path for one in names if not one.summary] == []


class TestRepositoryPages:
    def test_links_are_rewritten_to_site_pages(self, maker: Maker) -> None:
        pages = maker("repository_pages")
        source = pages.ROOT / "development" / "notes" / "any.md"
        text = "[a](../../docs/concepts/credit.md#gigpo) [b](../sandbox.md) [c](https://x.org) [d](../../Makefile)"
        assert pages._rewritten(text, source, "development/notes/any.md") == (
            "[a](../../concepts/credit.md#gigpo) [b](../sandbox.md) [c](https://x.org) d"
        )

    def test_code_blocks_are_not_rewritten(self, maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pages = maker("repository_pages")
        (tmp_path / "development").mkdir()
        block = "```text\n[a](../Makefile)\n```"
        (tmp_path / "development" / "some.md").write_text(f"[a](../Makefile)\n\n{block}\n")
        (tmp_path / "CHANGELOG.md").write_text("See [some](development/some.md).\n")
        monkeypatch.setattr(pages, "ROOT", tmp_path)
        assert pages.page("development/some.md") == f"---\nsearch:\n  exclude: true\n---\na\n\n{block}\n"
        assert pages.page("releases.md") == "See [some](development/some.md).\n"

    def test_every_note_and_the_changelog_have_pages(self, maker: Maker) -> None:
        sources = maker("repository_pages").sources()
        assert {"releases.md", "development/layout.md", "development/notes/estimators.md"} <= sources.keys()
        committed = {path.relative_to(DOCS).as_posix() for path in (DOCS / "development").rglob("*.md")}
        assert not committed & sources.keys(), "two files would be one page"

"""The console: untrusted text is neither markup nor a control sequence."""

from __future__ import annotations

import io

import pytest
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from reward_kit.console import SafeConsole

HOSTILE = "[red]x[/red][link=https://evil.example]y[/link] :smile: \x1b]8;;https://evil.example\x07z\x1b[2J\x9b2J\u202e"


def printed(renderable: RenderableType) -> str:
    file = io.StringIO()
    SafeConsole(file=file, width=300, force_terminal=True, force_jupyter=False).print(renderable, style="yellow")
    return file.getvalue()


def in_a_table(cell: RenderableType) -> Table:
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(cell)
    return table


@pytest.mark.parametrize("renderable", [HOSTILE, Text(HOSTILE), in_a_table(HOSTILE), in_a_table(Text(HOSTILE))])
def test_untrusted_text_is_shown_literally(renderable: RenderableType) -> None:
    text = printed(renderable)
    assert "[link=https://evil.example]y[/link] :smile:" in text
    assert not {"\x1b]", "\x1b[2J", "\x9b", "\u202e", "\x07"} & set(_parts(text))


def _parts(text: str) -> set[str]:
    return {text[at : at + size] for at in range(len(text)) for size in (1, 2, 4)}


def test_console_styles_and_live_display_still_work() -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, width=80, force_terminal=True, force_jupyter=False, color_system="standard")
    with Live(Text("one\ntwo"), console=console, auto_refresh=False, transient=True) as live:
        live.refresh()
    console.print("note", style="yellow")
    assert "\x1b[1A" in file.getvalue() and "\x1b[33mnote" in file.getvalue()

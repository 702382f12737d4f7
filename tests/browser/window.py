"""A Chromium page that records its errors, with helpers for common checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, ConsoleMessage, Page, Request

PHONE = (390, 844)
DESK = (1280, 800)

_QUESTIONS = Path(__file__).with_name("questions.js").read_text(encoding="utf-8")


class Window:
    """One page.

    Attributes:
        page: of playwright.
        wrong: errors and warnings of the console, exceptions, and dialogs that a script opened.
        requests: what was asked for, in order.
    """

    def __init__(self, context: BrowserContext) -> None:
        self.page: Page = context.new_page()
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.set_default_timeout(60_000)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.wrong.append(f"exception: {error}"))
        self.page.on("dialog", self._dialog)
        self.page.on("request", self._asked)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.wrong.append(f"{message.type}: {message.text}")

    def _dialog(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _asked(self, request: Request) -> None:
        if not request.url.startswith(("data:", "blob:")):
            self.requests.append(request.url)

    def open(self, place: Path | str, hash: str = "") -> Window:
        """Open a file or an address."""
        url = place.resolve().as_uri() if isinstance(place, Path) else place
        self.page.goto(url + hash)
        return self

    def first_paint_s(self) -> float:
        """Return seconds from the start of navigation to the first text or picture."""
        milliseconds = self.page.evaluate(
            """() => new Promise((done) => {
              const told = (list) => {
                const found = list.getEntriesByName("first-contentful-paint");
                if (found.length) done(found[0].startTime);
              };
              new PerformanceObserver(told).observe({ type: "paint", buffered: true });
            })"""
        )
        return float(milliseconds) / 1000

    def texts(self, selector: str) -> list[str]:
        """Return the visible text of these elements."""
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def column(self, table: str, place: int) -> list[str]:
        """Return the visible cells of a column, counted from 0, of a sortable table."""
        return self.texts(f"[data-table={table}] tbody td:nth-child({place + 1})")

    def unreached(self) -> list[str]:
        """Return the interactive elements that Tab does not reach from the top of the page."""
        for _ in range(self._ask("watchFocus") + 10):
            self.page.keyboard.press("Tab")
        found: list[str] = self._ask("unreached")
        return found

    def sticking_out(self) -> list[str]:
        """Return the elements that exceed the page width."""
        found: list[str] = self._ask("stickingOut")
        return found

    def pale(self) -> list[str]:
        """Return texts whose contrast is below WCAG level AA."""
        found: list[str] = self._ask("pale")
        return found

    def _ask(self, question: str) -> Any:
        return self.page.evaluate(f"({_QUESTIONS}).{question}()")

"""One visit to the shop: which page the visitor is on, where each link leads, and what the pages say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from reward_kit.environments.webshop.catalogue import Catalogue, Product
from reward_kit.environments.webshop.words import KINDS
from reward_kit.errors import ToolError, did_you_mean

SECTIONS = ("features", "description")


@dataclass(frozen=True, slots=True)
class Visit:
    """Where the visitor is; a small value, replaced by every action.

    Attributes:
        results: the numbers of the products that the last search found, None before the first.
        page: the page of the results, from 0.
        product: the number of the product that is open, None on the start page and among the results.
        section: the section of the product's texts that is open, "" for none.
        options: what is chosen for the open product, by name.
        bought: the visit has ended.
    """

    results: tuple[int, ...] | None = None
    page: int = 0
    product: int | None = None
    section: str = ""
    options: tuple[tuple[str, str], ...] = ()
    bought: bool = False

    def to_json(self) -> list[Any]:
        """The whole visit as a JSON value, for its key."""
        options = [list(choice) for choice in self.options]
        return [self.results, self.page, self.product, self.section, options, self.bought]


class Shop:
    """The pages over one catalogue.

    Args:
        catalogue: the products.
        page_size: how many results a page shows.
    """

    def __init__(self, catalogue: Catalogue, page_size: int) -> None:
        self.catalogue = catalogue
        self.page_size = page_size

    def open(self, visit: Visit, product_id: str) -> Visit:
        """Open a product that the present page of results shows."""
        shown = [self.catalogue.products[number].id for number in self.shown(visit)]
        if product_id not in shown:
            raise ToolError(f"open: product_id: {product_id!r} is not on this page{did_you_mean(product_id, shown)}")
        return replace(visit, product=self.catalogue.numbers[product_id])

    def view(self, visit: Visit, section: str) -> Visit:
        """Open a section of the product's texts."""
        self.opened(visit)
        if section not in SECTIONS:
            raise ToolError(f"view: section: {section!r}{did_you_mean(section, SECTIONS)}")
        return replace(visit, section=section)

    def choose(self, visit: Visit, option: str, value: str) -> Visit:
        """Choose a value of an option of the open product, in place of one chosen before."""
        offered = self.opened(visit).options
        if option not in offered:
            raise ToolError(f"choose: option: {option!r}{did_you_mean(option, offered)}")
        if value not in offered[option]:
            raise ToolError(f"choose: value: {value!r} is no {option}; there are {', '.join(offered[option])}")
        return replace(visit, section="", options=tuple(sorted({**dict(visit.options), option: value}.items())))

    def turn(self, visit: Visit, pages: int) -> Visit:
        """Go to another page of the results."""
        page = visit.page + pages
        if visit.results is None or visit.product is not None:
            raise ToolError("there are no results on this page")
        if not 0 <= page < self._pages(visit):
            raise ToolError(f"there is no {'next' if pages > 0 else 'previous'} page")
        return replace(visit, page=page)

    def back(self, visit: Visit) -> Visit:
        """From a section to the product, from the product to the results, from the results to the start."""
        if visit.section:
            return replace(visit, section="")
        if visit.product is not None:
            return replace(visit, product=None, options=())
        if visit.results is None:
            raise ToolError("back: this is the start page")
        return Visit()

    def opened(self, visit: Visit) -> Product:
        """The product that is open.

        Raises:
            ToolError: none is.
        """
        if visit.product is None:
            raise ToolError("no product is open; open one of the results first")
        return self.catalogue.products[visit.product]

    def shown(self, visit: Visit) -> tuple[int, ...]:
        """The products that the present page of results shows."""
        if visit.results is None or visit.product is not None:
            return ()
        return visit.results[visit.page * self.page_size :][: self.page_size]

    def text(self, visit: Visit) -> str:
        """What the page says."""
        if visit.bought:
            return "The order is placed. Thank you for your visit."
        if visit.product is not None:
            return _product_page(self.opened(visit), visit)
        if visit.results is None:
            return "Start page. Search to see products."
        if not visit.results:
            return "No product was found. Search for something else."
        found = (self.catalogue.products[number] for number in self.shown(visit))
        lines = [f"{product.id} | ${product.price:.2f} | {product.title}" for product in found]
        head = f"Results, page {visit.page + 1} of {self._pages(visit)} ({len(visit.results)} products)"
        return "\n".join([head, *lines])

    def actions(self, visit: Visit) -> Iterator[dict[str, Any]]:
        """Every link of the page, and on the start page a search for each kind of product there is."""
        if visit.bought:
            return
        if visit.product is not None:
            yield from self._product_actions(visit)
        elif visit.results is None:
            for kind in KINDS:
                yield _call("search", query=kind.name)
            return
        for number in self.shown(visit):
            yield _call("open", product_id=self.catalogue.products[number].id)
        if visit.product is None and visit.page + 1 < self._pages(visit):
            yield _call("next_page")
        if visit.product is None and visit.page > 0:
            yield _call("previous_page")
        yield _call("back")

    def _product_actions(self, visit: Visit) -> Iterator[dict[str, Any]]:
        chosen = dict(visit.options)
        for option, values in self.opened(visit).options.items():
            for value in values:
                if chosen.get(option) != value:
                    yield _call("choose", option=option, value=value)
        for section in SECTIONS:
            if section != visit.section:
                yield _call("view", section=section)
        yield _call("buy")

    def _pages(self, visit: Visit) -> int:
        return -(-len(visit.results or ()) // self.page_size)


def _product_page(product: Product, visit: Visit) -> str:
    head = f"{product.title}\n{product.id} | ${product.price:.2f}"
    if visit.section == "features":
        return "\n".join([head, "Features:", *(f"- {line}" for line in product.features)])
    if visit.section == "description":
        return f"{head}\nDescription: {product.description}"
    chosen = dict(visit.options)
    lines = [
        f"- {name}: {', '.join(values)}" + (f" (chosen: {chosen[name]})" if name in chosen else "")
        for name, values in product.options.items()
    ]
    return "\n".join([head, "Options:", *lines, f"More to view: {', '.join(SECTIONS)}"])


def _call(name: str, **arguments: str) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}

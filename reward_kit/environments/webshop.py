"""A small shop modeled on WebShop (Yao et al. 2022, arXiv 2207.01206). The agent can search, open, choose and buy.

Unlike in WebShop, the products are generated from a seed, every page allows a search, and the tools are typed. Only the
purchase is rewarded (`match_purchase`).
"""

from __future__ import annotations

import json
import random
import re
import sqlite3
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import anyio.to_thread
from pydantic import Field

from reward_kit.environments.base import (
    CopyForkResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    check_call,
    hash_key,
    strict_tool,
    tools_by_name,
)
from reward_kit.environments.config import ResourceConfig, read_config
from reward_kit.errors import ConfigError, ToolError, did_you_mean

MAX_TEXT_CHARS = 300
MAX_TERMS = 24
MAX_RESULTS = 50
SECTIONS = ("features", "description")
_MATCHING_RATIO = 85
_TOKEN = re.compile(r"[a-z0-9]+")
_TERM = re.compile(r"[^\W_]+")
_ID_LETTERS = "0123456789ABCDEFGHJKLMNPQRSTVWXYZ"
# The weights of a term, depending on its field: title, category, features, description, options (bm25 of FTS5).
_RANKING = "bm25(products, 6.0, 3.0, 3.0, 1.0, 1.0)"
_SEARCH = f"SELECT rowid FROM products WHERE products MATCH ? ORDER BY {_RANKING}, rowid LIMIT {MAX_RESULTS}"
_SENTENCES = (
    "I need a {name} with these features: {features}. I want it in {options}, at a price lower than {price} dollars.",
    "Please buy me a {name}, {features}. Choose {options}. The price must be lower than {price} dollars.",
    "I am looking for a {name} ({features}); {options}; price lower than {price} dollars.",
)
_COUNTED = {"boots": "pair of", "shoes": "pair of", "pants": "pair of", "earbuds": "pair of", "bars": "box of"}


class Kind(NamedTuple):
    """A kind of product.

    `keywords` contains additional nouns for titles, and `prices` is the price range in dollars.
    """

    name: str
    category: tuple[str, str, str]
    keywords: tuple[str, ...]
    attributes: tuple[str, ...]
    options: dict[str, Sequence[str]]
    prices: tuple[int, int]


_DATA = json.loads(Path(__file__).with_name("data").joinpath("webshop.json").read_text(encoding="utf-8"))
BRANDS: tuple[str, ...] = tuple(_DATA["brands"])
"""Invented brand names."""
PRAISE: tuple[str, ...] = tuple(_DATA["praise"])
KINDS: tuple[Kind, ...] = tuple(
    Kind._make(tuple(value) if isinstance(value, list) else value for value in kind.values()) for kind in _DATA["kinds"]
)


@dataclass(frozen=True, slots=True)
class ShoppingGoal:
    """A shopping goal, which has the same fields as `final_state()["goal"]`.

    `product_id`, `query`, `category` and `nouns` describe a product that satisfies the goal. `attributes` is U_att,
    `options` is U_opt keyed by option name, and `price_upper` is in dollars.
    """

    instruction: str
    product_id: str
    query: str
    category: Sequence[str]
    nouns: Sequence[str]
    attributes: Sequence[str]
    options: Mapping[str, str]
    price_upper: float


@dataclass(frozen=True, slots=True)
class Purchase:
    """A purchased product and the chosen options, with the same fields as `final_state()["purchase"]`."""

    product_id: str
    title: str
    query: str
    category: Sequence[str]
    nouns: Sequence[str]
    attributes: Sequence[str]
    features: Sequence[str]
    description: str
    options: Mapping[str, str]
    price: float


@dataclass(frozen=True, slots=True)
class Match:
    """The parts of a purchase's reward: the type factor, the number of met requirements, and the total number."""

    r_type: float
    attributes: int
    options: int
    price: bool
    wanted: int

    @property
    def reward(self) -> float:
        """The reward r, in [0, 1]."""
        return self.r_type * (self.attributes + self.options + self.price) / self.wanted


def match_purchase(goal: ShoppingGoal, purchase: Purchase) -> Match:
    """Compare a purchase with the goal like WebShop (section 3; `web_agent_site/engine/goal.py`).

        r = r_type · (|U_att ∩ Y_att| + |U_opt ∩ Y_opt| + [y_price ≤ u_price]) / (|U_att| + |U_opt| + 1)

    U is what was requested, and Y is what was bought. Two texts match if their token set ratio is above 85, but sizes
    must be equal. A requested attribute also counts if one of the product's texts contains it. An option counts if the
    value chosen under the same name matches. WebShop instead counts every chosen option that matches any requested
    value or occurs in a text, so its reward can exceed 1. WebShop's mapping of shades to base colors is omitted,
    because the catalog has no shades.
    """
    texts = [text.lower() for text in (purchase.title, " ".join(purchase.features), purchase.description)]
    attributes = [
        any(token_set_ratio(attribute, wanted) > _MATCHING_RATIO for attribute in purchase.attributes)
        or any(wanted in text for text in texts)
        for wanted in goal.attributes
    ]
    options = []
    for name, wanted in goal.options.items():
        chosen = purchase.options.get(name)
        if chosen is None or name.lower() == "size":
            options.append(chosen == wanted)
        else:
            options.append(token_set_ratio(chosen, wanted) > _MATCHING_RATIO)
    return Match(
        r_type=type_factor(goal, purchase),
        attributes=sum(attributes),
        options=sum(options),
        price=purchase.price <= goal.price_upper,
        wanted=len(goal.attributes) + len(goal.options) + 1,
    )


def type_factor(goal: ShoppingGoal, purchase: Purchase) -> float:
    """Return r_type. τ is the share of the requested product's nouns that the bought product has.

    The factor is 0 if τ = 0. It is 0.1 if τ < 0.1. It is 0.5 if τ ≤ 0.2, the product is listed by a different search,
    and fewer than two categories are shared. Otherwise, it is 1. The products list their nouns, whereas WebShop uses a
    tagger.
    """
    shared = len(set(goal.nouns) & set(purchase.nouns))
    title = shared / len(goal.nouns) if goal.nouns else 0.2
    if title == 0.0:
        return 0.0
    if title < 0.1:
        return 0.1
    same_category = len(set(goal.category) & set(purchase.category)) >= 2
    return 1.0 if title > 0.2 or purchase.query == goal.query or same_category else 0.5


@lru_cache(maxsize=4096)
def token_set_ratio(one: str, other: str) -> int:
    """Return the similarity of two strings as sets of words, from 0 to 100.

    It is computed in the same way as in thefuzz 0.19 with difflib.
    """
    first, second = set(_TOKEN.findall(one.lower())), set(_TOKEN.findall(other.lower()))
    common = " ".join(sorted(first & second))
    with_first = " ".join([common, *sorted(first - second)]).strip()
    with_second = " ".join([common, *sorted(second - first)]).strip()
    pairs = ((common, with_first), (common, with_second), (with_first, with_second))
    return max(round(100 * SequenceMatcher(None, a, b).ratio()) if a and b else 0 for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Product:
    """A product and its available options.

    `query` is the name of the product's kind, and `nouns` contains the nouns in its title in lower case.
    """

    product_id: str
    title: str
    query: str
    category: tuple[str, str, str]
    nouns: tuple[str, ...]
    attributes: tuple[str, ...]
    features: tuple[str, ...]
    description: str
    options: dict[str, tuple[str, ...]]
    price: float


def _draw_product(number: int, seed: int) -> Product:
    rng = random.Random(f"webshop product {seed} {number}")
    kind, brand = rng.choice(KINDS), rng.choice(BRANDS)
    attributes = tuple(rng.sample(kind.attributes, rng.randint(3, 5)))
    keywords = rng.sample(kind.keywords, 3)
    product_id = "B0" + "".join(rng.choices(_ID_LETTERS, k=8))
    features = [f"{attribute}: {praise}" for attribute, praise in zip(attributes, rng.sample(PRAISE, 5), strict=False)]
    description = f"The {brand} {kind.name}: {rng.choice(PRAISE)}. Also: {', '.join(attributes[2:])}."
    options = {}
    for name, values in kind.options.items():
        chosen = set(rng.sample(values, rng.randint(2, len(values))))
        options[name] = tuple(value for value in values if value in chosen)
    low, high = kind.prices
    return Product(
        product_id=product_id,
        title=f"{brand} {attributes[0]} {kind.name} {' '.join(keywords)}, {attributes[1]}".title(),
        query=kind.name,
        category=kind.category,
        nouns=tuple(f"{brand} {kind.name} {' '.join(keywords)}".lower().split()),
        attributes=attributes,
        features=(*features, f"for everyone who looks for {kind.keywords[0]} and {kind.keywords[1]}"),
        description=description,
        options=options,
        price=(100 * rng.randint(low, high) - rng.choice((1, 5, 50))) / 100,
    )


class Catalog:
    """The products for one seed, and their full-text index. A catalog can be used in any thread.

    A smaller catalog is a prefix of a larger one.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.name = f"{size} {seed}"
        self.products = tuple(_draw_product(number, seed) for number in range(size))
        self.numbers = {product.product_id: number for number, product in enumerate(self.products)}
        self._lock = threading.Lock()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._database.close)
        try:
            self._database.execute("CREATE VIRTUAL TABLE products USING fts5(title, category, features, text, options)")
        except sqlite3.OperationalError as error:
            raise ConfigError(f"webshop resource: the SQLite of this Python has no full-text search: {error}") from None
        rows = (
            (
                number,
                product.title,
                " ".join(product.category),
                " ".join(product.features),
                product.description,
                " ".join(value for values in product.options.values() for value in values),
            )
            for number, product in enumerate(self.products)
        )
        self._database.executemany(
            "INSERT INTO products (rowid, title, category, features, text, options) VALUES (?, ?, ?, ?, ?, ?)", rows
        )
        self._database.commit()
        self._database.execute("PRAGMA query_only = ON")

    def search(self, query: str) -> tuple[int, ...]:
        """Return the numbers of the best matches, ranked by BM25. A product need not contain every word.

        At most 50 numbers are returned.
        """
        terms = tuple(dict.fromkeys(_TERM.findall(query.lower())))
        if not terms:
            raise ToolError("search: query contains no word")
        if len(terms) > MAX_TERMS:
            raise ToolError(f"search: query has {len(terms)} different words, but the limit is {MAX_TERMS}")
        expression = " OR ".join(f'"{term}"' for term in terms)
        with self._lock:
            return tuple(row for (row,) in self._database.execute(_SEARCH, (expression,)))


_making = threading.Lock()
_made = lru_cache(maxsize=8)(Catalog)


def catalog(size: int, seed: int) -> Catalog:
    """Return the catalog for this size and seed. Each catalog is created once per process.

    Concurrent callers wait for it.
    """
    with _making:
        return _made(size, seed)


def draw_goal(shop: Catalog, index: int) -> ShoppingGoal:
    """Return the goal determined by the arguments. At least one product satisfies the goal.

    As in WebShop, the price bound is the larger of two random picks from the next four multiples of ten dollars.
    """
    rng = random.Random(f"webshop goal {shop.name} {index}")
    product = rng.choice(shop.products)
    attributes = tuple(rng.sample(product.attributes, rng.randint(1, 3)))
    options = {name: rng.choice(values) for name, values in product.options.items()}
    above = int(product.price // 10) + 1
    upper = 10.0 * max(rng.sample(range(above, above + 4), 2))
    instruction = rng.choice(_SENTENCES).format(
        name=f"{_COUNTED.get(product.query.split()[-1], '')} {product.query}".strip(),
        features=", ".join(attributes),
        options=" and ".join(f"{option} {value}" for option, value in options.items()),
        price=f"{upper:.2f}",
    )
    return ShoppingGoal(
        instruction=instruction,
        product_id=product.product_id,
        query=product.query,
        category=product.category,
        nouns=product.nouns,
        attributes=attributes,
        options=options,
        price_upper=upper,
    )


def satisfies(product: Product, goal: ShoppingGoal) -> bool:
    """Return True if the product, with the right options, earns the full reward.

    This function is stricter than `match_purchase`.
    """
    return (
        product.query == goal.query
        and product.price <= goal.price_upper
        and set(goal.attributes) <= set(product.attributes)
        and all(value in product.options.get(name, ()) for name, value in goal.options.items())
    )


class WebshopConfig(ResourceConfig):
    """The configuration of `webshop`."""

    products: int = Field(default=1000, ge=10, le=20_000, description="number of products")
    catalogue_seed: int = Field(default=0, description="seed of the product generator")
    page_size: int = Field(default=10, ge=1, le=50, description="results per page")
    index: int | None = Field(
        default=None, ge=0, description="the number of the goal; by default drawn from the reset's seed"
    )


@dataclass(frozen=True, slots=True)
class Visit:
    """The state of a visit. Every action replaces this object.

    `results` are product numbers, or None before the first search. `page` counts from 0. `product` is the number of the
    open product, `section` is the section of its page that is open, and `options` maps option names to the values
    chosen for the product.
    """

    results: tuple[int, ...] | None = None
    page: int = 0
    product: int | None = None
    section: str = ""
    options: tuple[tuple[str, str], ...] = ()
    bought: bool = False


_TEXT = {"type": "string"}
_SPECS = tools_by_name(
    strict_tool(
        "search", "Search the shop; the best matches come first.", query={**_TEXT, "maxLength": MAX_TEXT_CHARS}
    ),
    strict_tool("open", "Open one of the products that the page shows.", product_id=_TEXT),
    strict_tool("view", "Read more about the open product.", section={**_TEXT, "enum": list(SECTIONS)}),
    strict_tool("choose", "Choose a value of an option of the open product.", option=_TEXT, value=_TEXT),
    strict_tool("next_page", "Go to the next page of the results."),
    strict_tool("previous_page", "Go to the previous page of the results."),
    strict_tool("back", "Go back: from a text to its product, to the results, to the start."),
    strict_tool("buy", "Buy the open product with the options chosen. This ends the visit."),
)


class WebshopResource(CopyForkResource):
    """A visit with one goal. All environments in a process share the catalog."""

    per_sample_keys = frozenset({"index"})

    def __init__(self) -> None:
        self._settings = WebshopConfig()
        self._catalog: Catalog
        self._goal: ShoppingGoal
        self._goal_name = ""
        self._visit = Visit()
        self._actions = 0

    async def setup(self, config: Mapping[str, Any]) -> None:
        settings = self._settings = read_config(WebshopConfig, config, "webshop")
        self._catalog = await anyio.to_thread.run_sync(catalog, settings.products, settings.catalogue_seed)
        await self.reset(0)

    async def reset(self, seed: int | None = None) -> None:
        settings = self._settings
        index = settings.index if settings.index is not None else random.Random(seed).randrange(2**32)
        self._goal = draw_goal(self._catalog, index)
        self._goal_name = hash_key(self._catalog.name, str(settings.page_size), canonical_json(asdict(self._goal)))
        self._visit, self._actions = Visit(), 0

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        arguments: dict[str, str] = check_call(_SPECS, action_name, action_params)
        for name, value in arguments.items():
            if len(value) > MAX_TEXT_CHARS:
                raise ToolError(f"{action_name}: {name} has {len(value)} characters, but the limit is {MAX_TEXT_CHARS}")
        if self._visit.bought:
            raise ToolError("the visit is over; nothing can be changed")
        self._visit = await self._visit_after(action_name, arguments)
        self._actions += 1
        page = self._page_text()
        if not self._visit.bought:
            return StepOutcome(page, 0.0)
        match = match_purchase(self._goal, self._purchase())
        return StepOutcome(page, match.reward, terminated=True, info={"reward": match.reward, **asdict(match)})

    async def get_observation(self) -> Any:
        return f"Instruction: {self._goal.instruction}\n\n{self._page_text()}"

    async def get_tools_spec(self) -> list[ToolSpec]:
        return list(_SPECS.values())

    async def state_key(self) -> str:
        return hash_key(self._goal_name, canonical_json(astuple(self._visit)))

    async def final_state(self) -> StateSnapshot:
        """Return the goal, the purchase (None if nothing was bought), the reward, and the number of actions."""
        facts: dict[str, Any] = {"goal": asdict(self._goal), "purchase": None, "reward": 0.0, "actions": self._actions}
        if self._visit.bought:
            purchase = self._purchase()
            facts |= {"purchase": asdict(purchase), "reward": match_purchase(self._goal, purchase).reward}
        return StateSnapshot.from_json(facts)

    async def admissible_actions(self) -> Sequence[Mapping[str, Any]]:
        """Return the links on the page. The start page has one search for each kind of product instead."""
        visit = self._visit
        if visit.bought:
            return []
        if visit.product is None and visit.results is None:
            return [_call("search", query=kind.name) for kind in KINDS]
        if visit.product is not None:
            chosen, offered = dict(visit.options), self._open_product().options
            calls = [
                _call("choose", option=option, value=value)
                for option, values in offered.items()
                for value in values
                if chosen.get(option) != value
            ]
            calls += [_call("view", section=section) for section in SECTIONS if section != visit.section]
            return [*calls, _call("buy"), _call("back")]
        calls = [_call("open", product_id=self._catalog.products[number].product_id) for number in self._shown()]
        if visit.page + 1 < self._pages():
            calls.append(_call("next_page"))
        if visit.page > 0:
            calls.append(_call("previous_page"))
        return [*calls, _call("back")]

    async def expert_action(self) -> Mapping[str, Any] | None:
        """Return the expert's next action. It searches with words from the instruction and knows all attributes."""
        visit = self._visit
        if visit.bought:
            return None
        if visit.product is not None and self._fits(visit.product):
            chosen = dict(visit.options)
            for option, value in self._goal.options.items():
                if chosen.get(option) != value:
                    return _expert_call("choose", option=option, value=value)
            return _expert_call("buy")
        rank = next((rank for rank, number in enumerate(visit.results or ()) if self._fits(number)), None)
        if rank is None:
            query = await anyio.to_thread.run_sync(self._expert_query)
            return None if query is None else _expert_call("search", query=query)
        if visit.product is not None:
            return _expert_call("back")
        page = rank // self._settings.page_size
        if page != visit.page:
            return _expert_call("next_page" if page > visit.page else "previous_page")
        return _expert_call("open", product_id=self._catalog.products[(visit.results or ())[rank]].product_id)

    def _expert_query(self) -> str | None:
        """Return the first query that finds a satisfying product.

        The last candidate is a product title, which always finds one.
        """
        goal, shop = self._goal, self._catalog
        features, options = " ".join(goal.attributes), " ".join(goal.options.values())
        title = shop.products[shop.numbers[goal.product_id]].title
        queries = (f"{goal.query} {features}", f"{goal.query} {features} {options}", title)
        return next((query for query in queries if any(map(self._fits, shop.search(query)))), None)

    def _fits(self, number: int) -> bool:
        return satisfies(self._catalog.products[number], self._goal)

    async def _visit_after(self, name: str, arguments: Mapping[str, str]) -> Visit:
        visit = self._visit
        match name:
            case "search":
                return Visit(results=await anyio.to_thread.run_sync(self._catalog.search, arguments["query"]))
            case "open":
                product_id = arguments["product_id"]
                shown = [self._catalog.products[number].product_id for number in self._shown()]
                if product_id not in shown:
                    hint = did_you_mean(product_id, shown)
                    raise ToolError(f"open: product_id: {product_id!r} is not on this page{hint}")
                return replace(visit, product=self._catalog.numbers[product_id])
            case "view":
                self._open_product()
                return replace(visit, section=arguments["section"])
            case "choose":
                option, value = arguments["option"], arguments["value"]
                offered = self._open_product().options
                if option not in offered:
                    raise ToolError(f"choose: option: {option!r}{did_you_mean(option, offered)}")
                if value not in offered[option]:
                    known = ", ".join(offered[option])
                    raise ToolError(f"choose: value: {value!r} is not a {option}; known: {known}")
                return replace(visit, section="", options=tuple(sorted({**dict(visit.options), option: value}.items())))
            case "back" if visit.section:
                return replace(visit, section="")
            case "back" if visit.product is not None:
                return replace(visit, product=None, options=())
            case "back":
                if visit.results is None:
                    raise ToolError("back: this is the start page")
                return Visit()
            case "buy":
                self._open_product()
                return replace(visit, bought=True)
        if visit.results is None or visit.product is not None:
            raise ToolError("there are no results on this page")
        page = visit.page + (1 if name == "next_page" else -1)
        if not 0 <= page < self._pages():
            raise ToolError(f"the open product has no {name.replace('_', ' ')}")
        return replace(visit, page=page)

    def _open_product(self) -> Product:
        if self._visit.product is None:
            raise ToolError("no product is open; open one of the results first")
        return self._catalog.products[self._visit.product]

    def _purchase(self) -> Purchase:
        product = self._open_product()
        shared = {name: getattr(product, name) for name in Purchase.__slots__ if name != "options"}
        return Purchase(**shared, options=dict(self._visit.options))

    def _shown(self) -> tuple[int, ...]:
        """Return the products on the current page."""
        visit, size = self._visit, self._settings.page_size
        if visit.results is None or visit.product is not None:
            return ()
        return visit.results[visit.page * size :][:size]

    def _pages(self) -> int:
        return -(-len(self._visit.results or ()) // self._settings.page_size)

    def _page_text(self) -> str:
        visit = self._visit
        if visit.bought:
            return "The order is placed. Thank you for your visit."
        if visit.product is not None:
            product, chosen = self._open_product(), dict(visit.options)
            head = f"{product.title}\n{product.product_id} | ${product.price:.2f}"
            if visit.section == "features":
                return "\n".join([head, "Features:", *(f"- {line}" for line in product.features)])
            if visit.section == "description":
                return f"{head}\nDescription: {product.description}"
            lines = [
                f"- {name}: {', '.join(values)}" + (f" (chosen: {chosen[name]})" if name in chosen else "")
                for name, values in product.options.items()
            ]
            return "\n".join([head, "Options:", *lines, f"More to view: {', '.join(SECTIONS)}"])
        if visit.results is None:
            return "Start page. Search to see products."
        if not visit.results:
            return "No product was found. Search for something else."
        listed = (self._catalog.products[number] for number in self._shown())
        lines = [f"{product.product_id} | ${product.price:.2f} | {product.title}" for product in listed]
        head = f"Results, page {visit.page + 1} of {self._pages()} ({len(visit.results)} products)"
        return "\n".join([head, *lines])


def _call(name: str, **arguments: str) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def _expert_call(name: str, **arguments: str) -> dict[str, Any]:
    return {"type": "tool_call", **_call(name, **arguments)}

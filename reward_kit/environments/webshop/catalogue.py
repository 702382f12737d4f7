"""The shop's catalogue: products drawn from a seed, and a full-text search over them in SQLite's FTS5.

A catalogue never changes once it is made. It is made once in a process for each configuration and shared by all worlds.
"""

from __future__ import annotations

import random
import re
import sqlite3
import threading
import weakref
from dataclasses import dataclass
from functools import lru_cache

from reward_kit.environments.webshop.words import BRANDS, KINDS, PRAISE, Kind
from reward_kit.errors import ConfigError, ToolError

MAX_QUERY_CHARS = 300
MAX_TERMS = 24
MAX_RESULTS = 50

_ID_LETTERS = "0123456789ABCDEFGHJKLMNPQRSTVWXYZ"
_TERM = re.compile(r"[^\W_]+")
# How much a term counts by where it stands: title, category, features, description, options (bm25 of FTS5).
_RANKING = "bm25(products, 6.0, 3.0, 3.0, 1.0, 1.0)"
_SEARCH = f"SELECT rowid FROM products WHERE products MATCH ? ORDER BY {_RANKING}, rowid LIMIT {MAX_RESULTS}"


@dataclass(frozen=True, slots=True)
class Product:
    """One product.

    Attributes:
        id: ten letters and digits.
        title: as the results show it.
        query: the search for which the shop lists it: the name of its kind.
        category: a path of three levels.
        nouns: the nouns of the title, in lower case; the type rule of the reward compares them.
        attributes: what the product has; all of them stand in its texts.
        features: the lines of the features page.
        description: the text of the description page.
        options: what a buyer can choose, and among which values.
        price_cents: the price.
    """

    id: str
    title: str
    query: str
    category: tuple[str, str, str]
    nouns: tuple[str, ...]
    attributes: tuple[str, ...]
    features: tuple[str, ...]
    description: str
    options: dict[str, tuple[str, ...]]
    price_cents: int

    @property
    def price(self) -> float:
        """The price in dollars."""
        return self.price_cents / 100


class Catalogue:
    """The products of one seed and their index. Safe to share between worlds, event loops and threads.

    Args:
        size: how many products; those of a smaller catalogue are the first of a larger one.
        seed: other seeds give other products.

    Raises:
        ConfigError: this Python's SQLite has no FTS5.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.name = f"{size} {seed}"
        self.products = tuple(_product(number, seed) for number in range(size))
        self.numbers = {product.id: number for number, product in enumerate(self.products)}
        self._lock = threading.Lock()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._database.close)
        try:
            self._database.execute("CREATE VIRTUAL TABLE products USING fts5(title, category, features, text, options)")
        except sqlite3.OperationalError as error:
            raise ConfigError(f"webshop resource: this Python's SQLite cannot search texts: {error}") from None
        rows = ((number, *_indexed(product)) for number, product in enumerate(self.products))
        self._database.executemany(
            "INSERT INTO products (rowid, title, category, features, text, options) VALUES (?, ?, ?, ?, ?, ?)", rows
        )
        self._database.commit()
        self._database.execute("PRAGMA query_only = ON")

    def search(self, query: str) -> tuple[int, ...]:
        """The numbers of the best matches, at most 50: every word counts, none is required (BM25).

        Args:
            query: any text; only its letters and digits matter, so nothing in it is search syntax.

        Raises:
            ToolError: the query has no word, or too many.
        """
        terms = tuple(dict.fromkeys(_TERM.findall(query.lower())))
        if not terms:
            raise ToolError("search: query: there is no word in it")
        if len(terms) > MAX_TERMS:
            raise ToolError(f"search: query: {len(terms)} different words; at most {MAX_TERMS}")
        expression = " OR ".join(f'"{term}"' for term in terms)
        with self._lock:
            return tuple(row for (row,) in self._database.execute(_SEARCH, (expression,)))


_making = threading.Lock()
_made = lru_cache(maxsize=8)(Catalogue)


def catalogue(size: int, seed: int) -> Catalogue:
    """The catalogue of this size and seed, made once; who asks while it is being made waits."""
    with _making:
        return _made(size, seed)


def _indexed(product: Product) -> tuple[str, str, str, str, str]:
    options = " ".join(value for values in product.options.values() for value in values)
    return product.title, " ".join(product.category), " ".join(product.features), product.description, options


def _product(number: int, seed: int) -> Product:
    rng = random.Random(f"webshop product {seed} {number}")
    kind, brand = rng.choice(KINDS), rng.choice(BRANDS)
    attributes = tuple(rng.sample(kind.attributes, rng.randint(3, 5)))
    keywords = rng.sample(kind.keywords, 3)
    title = f"{brand} {attributes[0]} {kind.name} {' '.join(keywords)}, {attributes[1]}".title()
    return Product(
        id="B0" + "".join(rng.choices(_ID_LETTERS, k=8)),
        title=title,
        query=kind.name,
        category=kind.category,
        nouns=tuple(f"{brand} {kind.name} {' '.join(keywords)}".lower().split()),
        attributes=attributes,
        features=_features(rng, kind, attributes),
        description=f"The {brand} {kind.name}: {rng.choice(PRAISE)}. Also: {', '.join(attributes[2:])}.",
        options={name: _offered(rng, values) for name, values in kind.options.items()},
        price_cents=_price_cents(rng, kind),
    )


def _features(rng: random.Random, kind: Kind, attributes: tuple[str, ...]) -> tuple[str, ...]:
    lines = [f"{attribute}: {praise}" for attribute, praise in zip(attributes, rng.sample(PRAISE, 5), strict=False)]
    return (*lines, f"for everyone who looks for {kind.keywords[0]} and {kind.keywords[1]}")


def _offered(rng: random.Random, values: tuple[str, ...]) -> tuple[str, ...]:
    """Some of the values, in their order; at least two."""
    count = rng.randint(2, len(values))
    chosen = set(rng.sample(values, count))
    return tuple(value for value in values if value in chosen)


def _price_cents(rng: random.Random, kind: Kind) -> int:
    low, high = kind.prices
    return 100 * rng.randint(low, high) - rng.choice((1, 5, 50))

"""WebShop's reward of a purchase (Yao et al. 2022, arXiv 2207.01206, section 3; `web_agent_site/engine/goal.py`).

    r = r_type · (|U_att ∩ Y_att| + |U_opt ∩ Y_opt| + [y_price ≤ u_price]) / (|U_att| + |U_opt| + 1)

U is what the instruction asks for, Y what was bought. r_type compares the nouns of the two titles: with τ the share of
the wanted product's nouns that the bought one has,

    r_type = 0     where τ = 0
             0.1   where 0 < τ < 0.1
             0.5   where 0.1 ≤ τ ≤ 0.2, another search lists the product, and fewer than two categories are shared
             1     otherwise

Two texts match where their token set ratio (thefuzz 0.19 on Python's difflib) is above 85; sizes must be equal. An
attribute also counts where a text of the product contains it.

Three things differ from the published code. The nouns come with the product, where WebShop asks a tagger for them. Its
mapping of shades onto base colours is left out, since the catalogue has no shades. An option counts where the value
chosen under its own name matches, so that no more are matched than are asked for; the code counts every chosen option
that matches any wanted value, or stands in a text of the product, and can so exceed 1.
"""

from __future__ import annotations

import copy
import random
import re
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any, NamedTuple

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field

from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    hash_key,
    tool_spec,
)
from reward_kit.environments.config import read_config
from reward_kit.errors import ConfigError, ToolError, did_you_mean

_MATCHING_RATIO = 85

_TOKEN = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Goal:
    """What is asked for; the fields are those of `final_state()["goal"]`.

    Attributes:
        instruction: the text that the agent reads.
        product_id: a product that satisfies everything; others may as well.
        query: the search that lists it.
        category: its category path.
        nouns: the nouns of its title, in lower case.
        attributes: U_att.
        options: U_opt, by the options' names.
        price_upper: in dollars.
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
    """What was bought; the fields are those of `final_state()["purchase"]`, and those of `Product` where they agree.

    `options` are the chosen ones, `price` is in dollars.
    """

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
    """How well a purchase fits: the parts of the reward.

    Attributes:
        r_type: the type factor: 0, 0.1, 0.5 or 1.
        attributes: how many of the wanted attributes are met.
        options: how many of the wanted options are chosen.
        price: whether the price is within the bound.
        wanted: the denominator.
    """

    r_type: float
    attributes: int
    options: int
    price: bool
    wanted: int

    @property
    def reward(self) -> float:
        """r, in [0, 1]."""
        return self.r_type * (self.attributes + self.options + self.price) / self.wanted


def match_purchase(goal: Goal, purchase: Purchase) -> Match:
    """Compare a purchase with the goal."""
    return Match(
        r_type=type_factor(goal, purchase),
        attributes=sum(_has_attribute(purchase, attribute) for attribute in goal.attributes),
        options=sum(_is_chosen(purchase, name, value) for name, value in goal.options.items()),
        price=purchase.price <= goal.price_upper,
        wanted=len(goal.attributes) + len(goal.options) + 1,
    )


def type_factor(goal: Goal, purchase: Purchase) -> float:
    """r_type."""
    shared = len(set(goal.nouns) & set(purchase.nouns))
    title = shared / len(goal.nouns) if goal.nouns else 0.2
    if title == 0.0:
        return 0.0
    if title < 0.1:
        return 0.1
    same_category = len(set(goal.category) & set(purchase.category)) >= 2
    return 1.0 if title > 0.2 or purchase.query == goal.query or same_category else 0.5


def _has_attribute(purchase: Purchase, wanted: str) -> bool:
    if any(token_set_ratio(attribute, wanted) > _MATCHING_RATIO for attribute in purchase.attributes):
        return True
    texts = (purchase.title, " ".join(purchase.features), purchase.description)
    return any(wanted in text.lower() for text in texts)


def _is_chosen(purchase: Purchase, name: str, wanted: str) -> bool:
    chosen = purchase.options.get(name)
    if chosen is None:
        return False
    if name.lower() == "size":
        return chosen == wanted
    return token_set_ratio(chosen, wanted) > _MATCHING_RATIO


@lru_cache(maxsize=4096)
def token_set_ratio(one: str, other: str) -> int:
    """How alike two texts are as sets of words, 0 to 100, as thefuzz 0.19 counts it.

    The greatest similarity among three texts: the words that both have, and these with the rest of either.
    """
    first, second = set(_TOKEN.findall(one.lower())), set(_TOKEN.findall(other.lower()))
    common = " ".join(sorted(first & second))
    with_first = " ".join([common, *sorted(first - second)]).strip()
    with_second = " ".join([common, *sorted(second - first)]).strip()
    return max(_ratio(common, with_first), _ratio(common, with_second), _ratio(with_first, with_second))


def _ratio(one: str, other: str) -> int:
    if not one or not other:
        return 0
    return round(100 * SequenceMatcher(None, one, other).ratio())


class Kind(NamedTuple):
    """One kind of product.

    Attributes:
        name: what people search for; all of its words are nouns, or count as such.
        category: a path of three levels.
        keywords: further nouns that sellers put into the title.
        attributes: what a product may be said to have.
        options: what a buyer chooses, and among which values.
        prices: the lowest and the highest price, in dollars.
    """

    name: str
    category: tuple[str, str, str]
    keywords: tuple[str, ...]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    prices: tuple[int, int]


def _kind(name: str, category: str, keywords: str, attributes: str, options: str, prices: tuple[int, int]) -> Kind:
    """A kind from its short form: " > " between levels, ", " between words, "; " between options."""
    first, second, third = category.split(" > ")
    chosen = (entry.split(": ") for entry in options.split("; "))
    named = {option: tuple(values.split(", ")) for option, values in chosen}
    return Kind(name, (first, second, third), tuple(keywords.split()), tuple(attributes.split(", ")), named, prices)


_HUES = "black, white, navy, red, green, grey, beige, purple"

_WEAR = "size: xs, s, m, l, xl, xxl"

_SHOE = "size: 6, 7, 8, 9, 10, 11, 12"

_CLOTHES = "machine washable, quick drying, long sleeve, stretch fabric, regular fit, organic cotton, moisture wicking"

_GADGET = "fast charging, water resistant, low latency, noise reducing, long battery life, touch control, easy pairing"

_FOOD = "gluten free, non gmo, low sugar, fair trade, vegan, resealable bag, no artificial flavors, kosher certified"

_BEAUTY = (
    "fragrance free, cruelty free, dermatologist tested, paraben free, for sensitive skin, long lasting, alcohol free"
)

_ROOM = "easy assembly, solid wood, space saving, scratch resistant, adjustable height, metal frame, non slip feet"

_COOK = "dishwasher safe, bpa free, heat resistant, nonstick, stainless steel, leak proof, easy to clean"

_SPORT = "sweat proof, lightweight, shock absorbing, adjustable strap, non slip grip, foldable, carry bag included"

KINDS: tuple[Kind, ...] = (
    _kind(
        "rain jacket",
        "Clothing > Outerwear > Rainwear",
        "windbreaker shell parka anorak raincoat",
        f"waterproof, wind resistant, hidden hood, reflective trim, {_CLOTHES}",
        f"color: {_HUES}; {_WEAR}",
        (25, 140),
    ),
    _kind(
        "down vest",
        "Clothing > Outerwear > Vests",
        "gilet bodywarmer puffer layer insulation",
        f"wind resistant, zip pockets, stand collar, {_CLOTHES}",
        f"color: {_HUES}; {_WEAR}",
        (20, 110),
    ),
    _kind(
        "polo shirt",
        "Clothing > Tops > Polos",
        "golf uniform tee collar placket",
        f"short sleeve, wrinkle free, button closure, {_CLOTHES}",
        f"color: {_HUES}; {_WEAR}",
        (10, 60),
    ),
    _kind(
        "yoga pants",
        "Clothing > Activewear > Leggings",
        "tights workout gym waistband capri",
        f"high waist, tummy control, side pockets, squat proof, {_CLOTHES}",
        f"color: {_HUES}; {_WEAR}",
        (12, 70),
    ),
    _kind(
        "hiking boots",
        "Shoes > Outdoor > Boots",
        "trekking trail footwear ankle mountain",
        "waterproof, slip resistant, wide width, memory foam, steel toe, rubber sole, arch support",
        f"color: brown, black, olive, grey; {_SHOE}",
        (35, 190),
    ),
    _kind(
        "running shoes",
        "Shoes > Athletic > Running",
        "sneakers trainers jogging marathon footwear",
        "breathable mesh, arch support, memory foam, rubber sole, reflective trim, wide width, slip resistant",
        f"color: {_HUES}; {_SHOE}",
        (30, 160),
    ),
    _kind(
        "wool blanket",
        "Home > Bedding > Blankets",
        "throw bedspread cover couch camping",
        "machine washable, hypoallergenic, reversible, double stitched, extra thick, moth proof",
        "color: cream, charcoal, rust, teal; size: twin, queen, king",
        (25, 150),
    ),
    _kind(
        "shower curtain",
        "Home > Bath > Curtains",
        "liner bathroom drape hooks tub",
        "mildew resistant, machine washable, quick drying, weighted hem, rust proof grommets, extra long",
        "color: white, teal, charcoal, sage; size: 60x72, 72x72, 72x84",
        (9, 55),
    ),
    _kind(
        "desk lamp",
        "Home > Lighting > Lamps",
        "office reading nightstand study bulb",
        "dimmable, usb port, eye caring, touch control, adjustable arm, memory function, energy saving",
        "color: black, white, silver, gold",
        (15, 90),
    ),
    _kind(
        "bar stool",
        "Home > Furniture > Stools",
        "counter kitchen seat chair pub",
        f"swivel seat, faux leather, padded back, {_ROOM}",
        "color: walnut, espresso, white, grey; pack: 1 pack, 2 pack, 4 pack",
        (40, 260),
    ),
    _kind(
        "bookshelf",
        "Home > Furniture > Shelves",
        "bookcase rack storage organizer shelving",
        f"open back, wall mounted, {_ROOM}",
        "color: walnut, oak, white, black; tiers: 3 tier, 4 tier, 5 tier",
        (30, 220),
    ),
    _kind(
        "water bottle",
        "Kitchen > Drinkware > Bottles",
        "flask tumbler canteen hydration thermos",
        f"double wall, wide mouth, sweat proof, carry handle, {_COOK}",
        f"color: {_HUES}; size: 18 oz, 24 oz, 32 oz, 40 oz",
        (10, 50),
    ),
    _kind(
        "frying pan",
        "Kitchen > Cookware > Pans",
        "skillet omelette griddle stove induction",
        f"oven safe, even heating, ceramic coating, {_COOK}",
        "size: 8 inch, 10 inch, 12 inch",
        (15, 110),
    ),
    _kind(
        "lunch box",
        "Kitchen > Storage > Lunch",
        "bento container meal kids tote",
        f"insulated, microwave safe, removable dividers, {_COOK}",
        "color: blue, pink, green, grey; size: small, large",
        (9, 45),
    ),
    _kind(
        "wireless earbuds",
        "Electronics > Audio > Headphones",
        "bluetooth earphones headset buds charger",
        f"sweat proof, deep bass, {_GADGET}",
        "color: black, white, mint, rose",
        (15, 180),
    ),
    _kind(
        "portable speaker",
        "Electronics > Audio > Speakers",
        "bluetooth stereo boombox party soundbox",
        f"deep bass, dust proof, built in microphone, {_GADGET}",
        "color: black, blue, red, camo",
        (18, 200),
    ),
    _kind(
        "phone case",
        "Electronics > Phones > Cases",
        "bumper cover shell protector smartphone",
        "shock proof, wireless charging compatible, slim fit, anti yellowing, raised edges, built in kickstand",
        "color: clear, black, lavender, navy; model: alpha 12, bravo 13, delta 14",
        (7, 40),
    ),
    _kind(
        "hdmi cable",
        "Electronics > Video > Cables",
        "cord wire monitor television adapter",
        "gold plated, high speed, braided nylon, plug and play, tangle free, flame retardant",
        "length: 3 ft, 6 ft, 10 ft, 15 ft; pack: 1 pack, 2 pack",
        (6, 35),
    ),
    _kind(
        "protein bars",
        "Grocery > Snacks > Bars",
        "snack nutrition breakfast energy granola",
        f"high protein, keto friendly, {_FOOD}",
        "flavor: peanut butter, dark chocolate, coconut, lemon; pack: 6 pack, 12 pack, 30 pack",
        (10, 60),
    ),
    _kind(
        "green tea",
        "Grocery > Beverages > Tea",
        "sachets matcha sencha leaves drink",
        f"caffeine free, loose leaf, {_FOOD}",
        "flavor: jasmine, mint, original, peach; size: 20 count, 100 count",
        (6, 40),
    ),
    _kind(
        "trail mix",
        "Grocery > Snacks > Nuts",
        "almonds cashews raisins snack fruit",
        f"lightly salted, high fiber, {_FOOD}",
        "flavor: tropical, classic, spicy; size: 8 oz, 16 oz, 32 oz",
        (7, 45),
    ),
    _kind(
        "face cream",
        "Beauty > Skin > Moisturizers",
        "lotion moisturizer hydration gel skincare",
        f"with vitamin c, with hyaluronic acid, non greasy, {_BEAUTY}",
        "size: 1 oz, 2 oz, 4 oz",
        (8, 75),
    ),
    _kind(
        "hair mask",
        "Beauty > Hair > Treatments",
        "conditioner repair keratin scalp treatment",
        f"sulfate free, with argan oil, for dry hair, for curly hair, {_BEAUTY}",
        "scent: coconut, vanilla, unscented; size: 8 oz, 16 oz",
        (8, 45),
    ),
    _kind(
        "lip balm",
        "Beauty > Lips > Balms",
        "chapstick butter gloss moisturizer stick",
        f"with spf, with shea butter, tinted, {_BEAUTY}",
        "flavor: cherry, honey, mint; pack: 1 pack, 3 pack",
        (4, 25),
    ),
    _kind(
        "yoga mat",
        "Sports > Fitness > Mats",
        "pilates exercise floor workout stretching",
        f"extra thick, eco friendly, odor free, {_SPORT}",
        f"color: {_HUES}; thickness: 4 mm, 6 mm, 10 mm",
        (15, 85),
    ),
    _kind(
        "camping tent",
        "Sports > Camping > Tents",
        "shelter dome backpacking canopy cabin",
        f"waterproof, easy setup, mesh windows, wind resistant, {_SPORT}",
        "color: orange, green, blue; capacity: two person, four person, six person",
        (45, 290),
    ),
    _kind(
        "bike helmet",
        "Sports > Cycling > Helmets",
        "bicycle cycling road commuter visor",
        f"certified safety, detachable liner, rear light, {_SPORT}",
        "color: white, black, lime, red; size: s, m, l",
        (20, 120),
    ),
    _kind(
        "dog leash",
        "Pets > Dogs > Leashes",
        "puppy lead rope walking collar",
        "reflective threads, padded handle, heavy duty, chew proof, tangle free, dual clip",
        "color: red, blue, black, pink; length: 4 ft, 6 ft, 10 ft",
        (7, 40),
    ),
    _kind(
        "cat tree",
        "Pets > Cats > Furniture",
        "tower condo scratcher kitten perch",
        "sisal posts, washable cushion, sturdy base, hanging toys, easy assembly, space saving",
        "color: beige, grey, brown; tiers: 2 tier, 3 tier, 5 tier",
        (30, 180),
    ),
    _kind(
        "throw pillow",
        "Home > Bedding > Pillows",
        "cushion sofa couch accent decor",
        "hidden zipper, machine washable, hypoallergenic, double stitched, plush filling, fade resistant",
        f"color: {_HUES}; size: 16x16, 18x18, 20x20",
        (8, 50),
    ),
)

_BRANDS = (
    "Northpine Kestrel Lumora Bramwell Ostara Fenwick Zephyra Halden Corvo Tamsin Alderly Brightwater Quillon Marlowe "
    "Sorrel Vantry Ellsworth Pavonia Drift Hollis Juniper Cascadia Rookwood Solveig Thistle Umbra Wexford Yarrow "
    "Ardent Belmere"
)

BRANDS: tuple[str, ...] = tuple(_BRANDS.split())

"""Invented names."""

PRAISE: tuple[str, ...] = (
    "made to last for years of daily use",
    "a favorite of people who have tried many others",
    "tested in our own workshop before it ships",
    "comes with a friendly support team",
    "a thoughtful gift for birthdays and holidays",
    "packed without plastic",
    "thirty days to send it back",
    "designed by a small team that uses it",
)

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


_SENTENCES = (
    "I need a {name} with these features: {features}. I want it in {options}, at a price lower than {price} dollars.",
    "Please buy me a {name}, {features}. Choose {options}. The price must be lower than {price} dollars.",
    "I am looking for a {name} ({features}); {options}; price lower than {price} dollars.",
)

_COUNTED = {"boots": "pair of", "shoes": "pair of", "pants": "pair of", "earbuds": "pair of", "bars": "box of"}


def draw_goal(shop: Catalogue, index: int) -> Goal:
    """The goal of this number; the same arguments always give the same.

    As in WebShop, the bound on the price is the larger of two among the next four multiples of ten dollars above it.
    """
    rng = random.Random(f"webshop goal {shop.name} {index}")
    product = rng.choice(shop.products)
    attributes = tuple(rng.sample(product.attributes, rng.randint(1, 3)))
    options = {name: rng.choice(values) for name, values in product.options.items()}
    above = product.price_cents // 1000 + 1
    upper = 10.0 * max(rng.sample(range(above, above + 4), 2))
    return Goal(
        instruction=_instruction(rng, product, attributes, options, upper),
        product_id=product.id,
        query=product.query,
        category=product.category,
        nouns=product.nouns,
        attributes=attributes,
        options=options,
        price_upper=upper,
    )


def _instruction(
    rng: random.Random, product: Product, attributes: tuple[str, ...], options: dict[str, str], upper: float
) -> str:
    name = f"{_COUNTED.get(product.query.split()[-1], '')} {product.query}".strip()
    chosen = " and ".join(f"{option} {value}" for option, value in options.items())
    sentence = rng.choice(_SENTENCES)
    return sentence.format(name=name, features=", ".join(attributes), options=chosen, price=f"{upper:.2f}")


def satisfies(product: Product, goal: Goal) -> bool:
    """Whether buying this product, with the right options, is worth the full reward.

    Exact where the reward's comparison of texts is lenient: what satisfies here always does there.
    """
    return (
        product.query == goal.query
        and product.price <= goal.price_upper
        and set(goal.attributes) <= set(product.attributes)
        and all(value in product.options.get(name, ()) for name, value in goal.options.items())
    )


def queries(goal: Goal, shop: Catalogue) -> tuple[str, ...]:
    """What an expert would search for, the next where one finds nothing that satisfies the goal.

    First only what the instruction says, and at last the title, which always finds its product.
    """
    features, options = " ".join(goal.attributes), " ".join(goal.options.values())
    title = shop.products[shop.numbers[goal.product_id]].title
    return f"{goal.query} {features}", f"{goal.query} {features} {options}", title


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


_TEXT = {"type": "string"}


def _spec(name: str, description: str, **properties: dict[str, Any]) -> ToolSpec:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if properties:
        schema["required"] = list(properties)
    return tool_spec(name, description, schema)


_SPECS: dict[str, ToolSpec] = {
    "search": _spec(
        "search", "Search the shop; the best matches come first.", query={**_TEXT, "maxLength": MAX_QUERY_CHARS}
    ),
    "open": _spec("open", "Open one of the products that the page shows.", product_id=_TEXT),
    "view": _spec("view", "Read more about the open product.", section={**_TEXT, "enum": list(SECTIONS)}),
    "choose": _spec("choose", "Choose a value of an option of the open product.", option=_TEXT, value=_TEXT),
    "next_page": _spec("next_page", "Go to the next page of the results."),
    "previous_page": _spec("previous_page", "Go to the previous page of the results."),
    "back": _spec("back", "Go back: from a text to its product, to the results, to the start."),
    "buy": _spec("buy", "Buy the open product with the options chosen. This ends the visit."),
}


class WebshopConfig(BaseModel):
    """The configuration of `webshop`."""

    model_config = ConfigDict(extra="forbid")

    products: int = Field(default=1000, ge=10, le=20_000, description="how many the shop has")
    catalogue_seed: int = Field(default=0, description="other seeds give other products")
    page_size: int = Field(default=10, ge=1, le=50, description="how many results a page shows")
    index: int | None = Field(default=None, ge=0, description="which goal; by default the reset's seed picks one")


class WebshopResource(ForkableResource):
    """One visit with one goal, in a catalogue that all worlds of a process share."""

    fork_kind = "native"
    per_sample_keys = frozenset({"index"})

    def __init__(self) -> None:
        self._settings = WebshopConfig()
        self._shop: Shop
        self._goal: Goal
        self._goal_name = ""
        self._visit = Visit()
        self._actions = 0

    async def setup(self, config: Mapping[str, Any]) -> None:
        settings = self._settings = read_config(WebshopConfig, config, "webshop")
        products = await anyio.to_thread.run_sync(catalogue, settings.products, settings.catalogue_seed)
        self._shop = Shop(products, settings.page_size)
        await self.reset(0)

    async def reset(self, seed: int | None = None) -> None:
        settings = self._settings
        index = settings.index if settings.index is not None else random.Random(seed).randrange(2**32)
        self._goal = draw_goal(self._shop.catalogue, index)
        self._goal_name = hash_key(
            self._shop.catalogue.name, str(settings.page_size), canonical_json(asdict(self._goal))
        )
        self._visit, self._actions = Visit(), 0

    async def fork(self) -> ForkableResource:
        # The visit is replaced by every action, and all else never changes, so two worlds may hold the same values.
        return copy.copy(self)

    async def checkpoint(self) -> Any:
        return dict(vars(self))

    async def restore(self, state: Any) -> None:
        vars(self).update(state)

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        arguments = _checked(action_name, action_params)
        if self._visit.bought:
            raise ToolError("the visit is over; nothing can be changed")
        self._visit = await self._after(action_name, arguments)
        self._actions += 1
        page = self._shop.text(self._visit)
        if not self._visit.bought:
            return StepOutcome(page, 0.0)
        match = match_purchase(self._goal, self._purchase())
        return StepOutcome(page, match.reward, terminated=True, info={"reward": match.reward, **asdict(match)})

    async def get_observation(self) -> Any:
        return f"Instruction: {self._goal.instruction}\n\n{self._shop.text(self._visit)}"

    async def get_tools_spec(self) -> list[ToolSpec]:
        return list(_SPECS.values())

    async def state_key(self) -> str:
        return hash_key(self._goal_name, canonical_json(self._visit.to_json()))

    async def final_state(self) -> StateSnapshot:
        """The goal, the purchase (None where nothing was bought), its reward, and how many actions were taken."""
        facts: dict[str, Any] = {"goal": asdict(self._goal), "purchase": None, "reward": 0.0, "actions": self._actions}
        if self._visit.bought:
            purchase = self._purchase()
            facts |= {"purchase": asdict(purchase), "reward": match_purchase(self._goal, purchase).reward}
        return StateSnapshot.from_json(facts)

    async def admissible_actions(self) -> Sequence[Mapping[str, Any]]:
        """The links of the page; on the start page a search for each kind of product."""
        return list(self._shop.actions(self._visit))

    async def expert_action(self) -> Mapping[str, Any] | None:
        """The next action of one who searches for what the instruction says, and knows every product's attributes."""
        visit = self._visit
        if visit.bought:
            return None
        if visit.product is None or not self._fits(visit.product):
            return await self._towards_a_product()
        chosen = dict(visit.options)
        for name, value in self._goal.options.items():
            if chosen.get(name) != value:
                return _action("choose", option=name, value=value)
        return _action("buy")

    async def _after(self, name: str, arguments: Mapping[str, str]) -> Visit:
        shop, visit = self._shop, self._visit
        match name:
            case "search":
                return Visit(results=await anyio.to_thread.run_sync(shop.catalogue.search, arguments["query"]))
            case "open":
                return shop.open(visit, arguments["product_id"])
            case "view":
                return shop.view(visit, arguments["section"])
            case "choose":
                return shop.choose(visit, arguments["option"], arguments["value"])
            case "back":
                return shop.back(visit)
            case "buy":
                shop.opened(visit)
                return replace(visit, bought=True)
        return shop.turn(visit, 1 if name == "next_page" else -1)

    async def _towards_a_product(self) -> Mapping[str, Any] | None:
        """To the first product among the results that fits, or to results that have one."""
        visit = self._visit
        rank = next((rank for rank, number in enumerate(visit.results or ()) if self._fits(number)), None)
        if rank is None:
            query = await anyio.to_thread.run_sync(self._query)
            return None if query is None else _action("search", query=query)
        if visit.product is not None:
            return _action("back")
        page = rank // self._settings.page_size
        if page != visit.page:
            return _action("next_page" if page > visit.page else "previous_page")
        return _action("open", product_id=self._shop.catalogue.products[(visit.results or ())[rank]].id)

    def _query(self) -> str | None:
        shop = self._shop.catalogue
        asked = queries(self._goal, shop)
        return next((query for query in asked if any(map(self._fits, shop.search(query)))), None)

    def _fits(self, number: int) -> bool:
        return satisfies(self._shop.catalogue.products[number], self._goal)

    def _purchase(self) -> Purchase:
        return _purchase(self._shop.opened(self._visit), dict(self._visit.options))


def _purchase(product: Product, chosen: Mapping[str, str]) -> Purchase:
    return Purchase(
        product_id=product.id,
        title=product.title,
        query=product.query,
        category=product.category,
        nouns=product.nouns,
        attributes=product.attributes,
        features=product.features,
        description=product.description,
        options=dict(chosen),
        price=product.price,
    )


def _checked(name: str, arguments: Mapping[str, Any]) -> Mapping[str, str]:
    """The arguments of a call, all of which are texts."""
    if name not in _SPECS:
        raise ToolError(f"unknown tool {name!r}{did_you_mean(name, _SPECS)}")
    known: Mapping[str, Any] = _SPECS[name]["function"]["parameters"]["properties"]
    for key in arguments:
        if key not in known:
            raise ToolError(f"{name}: unknown argument {key!r}{did_you_mean(str(key), known)}")
    for key in known:
        if key not in arguments:
            raise ToolError(f"{name}: {key}: missing")
        if not isinstance(arguments[key], str):
            raise ToolError(f"{name}: {key}: must be text, got {arguments[key]!r:.80}")
        if len(arguments[key]) > MAX_QUERY_CHARS:
            raise ToolError(f"{name}: {key}: {len(arguments[key])} characters; at most {MAX_QUERY_CHARS}")
    return arguments


def _action(name: str, **arguments: str) -> dict[str, Any]:
    return {"type": "tool_call", "name": name, "arguments": arguments}

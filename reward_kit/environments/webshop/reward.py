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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache

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

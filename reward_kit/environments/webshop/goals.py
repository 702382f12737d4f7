"""What the agent is sent to buy: a goal drawn from a seed around one product, which satisfies all of it."""

from __future__ import annotations

import random

from reward_kit.environments.webshop.catalogue import Catalogue, Product
from reward_kit.environments.webshop.reward import Goal

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

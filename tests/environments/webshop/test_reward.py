"""Test the published reward of the shop: formula, thresholds and range."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.environments.webshop import (
    Purchase,
    ShoppingGoal,
    catalog,
    draw_goal,
    match_purchase,
    satisfies,
    token_set_ratio,
    type_factor,
)

SIZE = 200
GOAL = ShoppingGoal(
    instruction="",
    product_id="B000000001",
    query="rain jacket",
    category=("Clothing", "Outerwear", "Rainwear"),
    nouns=("kestrel", "rain", "jacket", "parka", "anorak"),
    attributes=("waterproof", "machine washable"),
    options={"color": "navy", "size": "m"},
    price_upper=60.0,
)
RIGHT = Purchase(
    product_id="B000000001",
    title="Kestrel Waterproof Rain Jacket Parka Anorak",
    query="rain jacket",
    category=("Clothing", "Outerwear", "Rainwear"),
    nouns=("kestrel", "rain", "jacket", "parka", "anorak"),
    attributes=("waterproof", "machine washable", "long sleeve"),
    features=("long sleeve: packed without plastic",),
    description="",
    options={"color": "navy", "size": "m"},
    price=60.0,
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 5 / 5),
        ({"price": 60.01}, 4 / 5),
        ({"options": {"color": "navy"}}, 4 / 5),
        ({"options": {"color": "red", "size": "m"}}, 4 / 5),
        ({"options": {}}, 3 / 5),
        # A size must be equal, and a value counts under its own name only.
        ({"options": {"color": "navy", "size": "M"}}, 4 / 5),
        ({"options": {"color": "m", "size": "navy"}}, 3 / 5),
        ({"options": {"color": "navy", "size": "m", "pack": "2 pack"}}, 5 / 5),
        ({"attributes": ("waterproof",)}, 4 / 5),
        ({"attributes": ()}, 4 / 5),  # "waterproof" is in the title
        ({"attributes": (), "title": "", "description": "Machine washable."}, 4 / 5),
        ({"attributes": (), "title": "", "features": ("waterproof: yes", "machine washable: yes")}, 5 / 5),
        ({"attributes": (), "title": ""}, 3 / 5),
        ({"attributes": (), "title": "", "options": {}, "price": 99.0}, 0.0),
        # Another type of product: no noun shared, whatever else fits.
        ({"nouns": ("hdmi", "cable")}, 0.0),
        # One noun of five is a share of 0.2, which alone is not enough.
        ({"nouns": ("kestrel",), "query": "polo shirt", "category": ("Clothing", "Tops", "Polos")}, 0.5),
        ({"nouns": ("kestrel",), "query": "polo shirt", "category": ("Clothing", "Tops", "Polos"), "price": 99}, 0.4),
    ],
)
def test_reward_of_a_purchase_matches_hand_computed_values(changes, expected) -> None:
    assert match_purchase(GOAL, replace(RIGHT, **changes)).reward == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("shared", "of", "query", "category", "expected"),
    [
        (0, 20, "rain jacket", "Clothing Outerwear Rainwear", 0.0),
        (1, 20, "rain jacket", "Clothing Outerwear Rainwear", 0.1),
        (2, 20, "polo shirt", "Clothing Tops Polos", 0.5),
        (4, 20, "polo shirt", "Clothing Tops Polos", 0.5),
        (5, 20, "polo shirt", "Clothing Tops Polos", 1.0),
        (2, 20, "rain jacket", "Home Bath Towels", 1.0),
        (2, 20, "polo shirt", "Clothing Outerwear Vests", 1.0),
        (0, 0, "polo shirt", "Clothing Tops Polos", 0.5),
    ],
)
def test_type_factor_has_the_published_thresholds(shared, of, query, category, expected) -> None:
    nouns = tuple(f"n{number}" for number in range(of))
    bought = replace(RIGHT, nouns=(*nouns[:shared], "other"), query=query, category=tuple(category.split()))
    assert type_factor(replace(GOAL, nouns=nouns), bought) == expected


@pytest.mark.parametrize(
    ("one", "other", "matches"),
    [
        ("essential oil", "essential oils", True),
        ("cool powder snow", "powder snow", True),
        ("Pack of 12", "12 pack of", True),
        ("tea bag", "tea tree", False),
        ("waterproof", "water resistant", False),
        ("", "", False),
    ],
)
def test_token_set_ratio_matches_the_published_examples(one, other, matches) -> None:
    assert (token_set_ratio(one, other) > 85) is matches
    assert token_set_ratio(one, other) == token_set_ratio(one, other.upper())


@given(st.data())
def test_reward_is_a_fraction_and_full_only_if_the_goal_is_met(data) -> None:
    shop = catalog(SIZE, 0)
    goal = draw_goal(shop, data.draw(st.integers(0, 10_000)))
    product = shop.products[data.draw(st.integers(0, SIZE - 1))]
    chosen = {name: data.draw(st.sampled_from(values)) for name, values in product.options.items()}
    fields = {
        name: getattr(product, name) for name in ("title", "query", "category", "nouns", "attributes", "features")
    }
    bought = Purchase(
        product.product_id, **fields, description=product.description, options=chosen, price=product.price
    )
    match = match_purchase(goal, bought)
    assert 0.0 <= match.reward <= 1.0
    assert (match.reward == 1.0) == (
        match.r_type == 1.0
        and match.attributes == len(goal.attributes)
        and match.options == len(goal.options)
        and match.price
    )
    if satisfies(product, goal):
        assert match_purchase(goal, replace(bought, options=goal.options)).reward == 1.0

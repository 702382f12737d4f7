"""Test the seeded product catalog, its search, and its goals."""

from __future__ import annotations

import sqlite3
import threading
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.environments.webshop import (
    KINDS,
    MAX_RESULTS,
    Catalog,
    catalog,
    draw_goal,
    satisfies,
    token_set_ratio,
)
from reward_kit.errors import ToolError

SIZE = 200


def test_catalog_follows_its_seed_and_smaller_catalogs_are_prefixes() -> None:
    products = catalog(SIZE, 0).products
    assert Catalog(50, 0).products == products[:50]
    assert Catalog(50, 1).products[0] != products[0]
    assert len({product.product_id for product in products}) == SIZE
    assert {product.query for product in products} == {kind.name for kind in KINDS}


def test_product_texts_contain_its_attributes() -> None:
    for product in catalog(SIZE, 0).products:
        text = f"{product.title} {' '.join(product.features)} {product.description}".lower()
        assert all(attribute in text for attribute in product.attributes)
        assert set(product.nouns) <= set(product.title.lower().replace(",", "").split())
        low, high = next(kind.prices for kind in KINDS if kind.name == product.query)
        assert low - 1 < product.price < high
        assert all(len(values) >= 2 for values in product.options.values())


def test_attributes_and_values_of_a_kind_never_match_each_other() -> None:
    for kind in KINDS:
        lists = [kind.attributes, *(values for name, values in kind.options.items() if name != "size")]
        for one, other in (pair for values in lists for pair in combinations(values, 2)):
            assert token_set_ratio(one, other) <= 85, (kind.name, one, other)
        assert set(kind.name.split()).isdisjoint(kind.keywords) and len(set(kind.keywords)) == 5


def test_resources_of_a_process_share_one_catalog() -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(catalog(20, 99))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(shop) for shop in found}) == 1


def test_shared_database_is_read_only() -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        catalog(SIZE, 0)._database.execute("DELETE FROM products")


def test_search_ranks_the_best_matches_first() -> None:
    shop = catalog(1000, 0)
    found = [shop.products[number] for number in shop.search("waterproof hiking boots")]
    assert len(shop.search("machine washable in color black")) == MAX_RESULTS
    assert found[0].query == "hiking boots" and "waterproof" in found[0].attributes
    first_without = next(rank for rank, product in enumerate(found) if product.query != "hiking boots")
    assert all(product.query == "hiking boots" for product in found[:first_without])
    assert shop.search("Waterproof, BOOTS hiking boots!") == shop.search("waterproof boots hiking")
    assert shop.search("zzzz") == ()


@pytest.mark.parametrize(
    "query",
    [
        'rain"jacket',
        "'; DROP TABLE products; --",
        "title : rain",
        "rain NEAR/2 jacket",
        "NOT rain",
        "AND OR NOT",
        "rain* ^jacket -coat + (",
        "{title category} : rain",
        "rain\x00jacket",
        "\ud800 rain",
        "² rain",
    ],
)
def test_query_syntax_is_ignored(query) -> None:
    shop = catalog(SIZE, 0)
    shop.search(query)
    assert shop.search("rain")


@given(st.text(st.characters(), max_size=300))
def test_search_accepts_any_text(query) -> None:
    try:
        found = catalog(20, 0).search(query)
    except ToolError:
        return
    assert len(found) <= 20


@pytest.mark.parametrize(
    ("query", "message"),
    [("", "no word"), ("*** __ !", "no word"), (" ".join(f"w{n}" for n in range(25)), "25 different words")],
)
def test_query_without_words_or_with_too_many_is_rejected(query, message) -> None:
    with pytest.raises(ToolError, match=message):
        catalog(SIZE, 0).search(query)


def test_goal_is_reproducible_and_met_by_its_product() -> None:
    shop = catalog(SIZE, 0)
    goals = [draw_goal(shop, index) for index in range(100)]
    assert goals == [draw_goal(shop, index) for index in range(100)]
    assert len({goal.instruction for goal in goals}) > 95
    for goal in goals:
        product = shop.products[shop.numbers[goal.product_id]]
        assert satisfies(product, goal)
        # The bound is the second to fourth multiple of ten dollars above the price.
        assert 10 < goal.price_upper - product.price <= 40 and goal.price_upper % 10 == 0
        wanted = [*goal.attributes, *goal.options.values(), goal.query, f"lower than {goal.price_upper:.2f} dollars"]
        assert all(text in goal.instruction for text in wanted)
